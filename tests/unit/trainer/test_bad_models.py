"""Models that cannot be trained on are refused when they are loaded; one that cannot share prompts goes through whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import LlamaModel

from composer_replication.cli.train_verb import run_recipe
from composer_replication.config import LoraSection, ModelSection
from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.policy import InProcessPolicy
from composer_replication.trainer.run_setup import refuse_long_prompts
from composer_replication.trainer.tiny_models import make_tiny_model, make_tiny_tools_model

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def saved(folder: Path, *, tied: bool = True, base_only: bool = False) -> Path:
    model, tokenizer = make_tiny_model(0)
    if not tied:
        model.config.tie_word_embeddings = False
        model = type(model)(model.config)
    (model.model if base_only else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    return load_model(ModelSection(name=str(folder)), seed=0)


def test_a_base_model_without_its_head(tmp_path: Path) -> None:
    saved(tmp_path, tied=False, base_only=True)
    assert isinstance(LlamaModel.from_pretrained(tmp_path), LlamaModel)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert caught.value.code == "CR0701"
    assert "lm_head.weight would be random" in caught.value.message


def test_a_base_model_whose_head_is_its_embedding_is_whole(tmp_path: Path) -> None:
    model, tokenizer = load(saved(tmp_path, tied=True, base_only=True))
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)
    assert (tokenizer.padding_side, model.dtype) == ("left", torch.float32)


def test_a_vision_language_model(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    Gemma3Config().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"CR0701.*a gemma3 model reads images or sound"):
        load(tmp_path)


def test_a_tokenizer_without_a_padding_token_pads_with_its_end(tmp_path: Path) -> None:
    saved(tmp_path)
    _, tokenizer = make_tiny_model(0)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path)[1].pad_token == "<eos>"
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="CR0701"):
        load(tmp_path)


def test_prompts_are_counted_as_the_model_reads_them() -> None:
    """The template adds 21 bytes to the 4 of the prompt; with 3 to answer that is 28."""
    model, tokenizer = make_tiny_model(0)
    tokenizer.chat_template = TEMPLATE
    rows = [{"prompt": [{"role": "user", "content": "abcd"}], "task_id": "t1"}]
    plain = [{"prompt": "abcd", "task_id": "t2"}]
    for prompts, longest in ((rows, 28), (plain, 7)):
        refuse_long_prompts(prompts, model, tokenizer, max_new_tokens=3, engine_limit=longest)
        with pytest.raises(InputError) as caught:
            refuse_long_prompts(prompts, model, tokenizer, max_new_tokens=3, engine_limit=longest - 1)
        assert caught.value.code == "CR0705"
        assert f"take {longest} tokens; the model has {longest - 1} positions" in caught.value.message
    model.config.max_position_embeddings = 6
    with pytest.raises(InputError, match="has 6 positions"):
        refuse_long_prompts(plain, model, tokenizer, max_new_tokens=3, engine_limit=None)


def test_a_template_that_raises() -> None:
    model, tokenizer = make_tiny_model(0)
    tokenizer.chat_template = "{{ raise_exception('only system messages') }}"
    rows = [{"prompt": [{"role": "user", "content": "x"}], "task_id": "one"}]
    with pytest.raises(InputError, match=r"CR0810.*does not take the conversation: only system messages"):
        refuse_long_prompts(rows, model, tokenizer, max_new_tokens=4, engine_limit=None)
    with pytest.raises(InputError, match="CR0810"):
        InProcessPolicy(model, tokenizer, as_chat=True).prompt_ids("x")


pytestmark = pytest.mark.timeout(600)

RECIPES = Path(__file__).parents[3] / "recipes"
PINS = tuple(f"tinymath/numbers.py::{name}" for name in ("absolute", "clamp", "square"))


@pytest.fixture(scope="module")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    return TaskStore.open(build_tiny(tmp_path_factory.mktemp("any-model") / "tasks", PINS))


def recurrent(folder: Path, *, with_tools: bool) -> str:
    _, tokenizer = (make_tiny_tools_model if with_tools else make_tiny_model)(0)
    words = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    torch.manual_seed(0)
    tf.MambaForCausalLM(tf.MambaConfig(bos_token_id=None, **sizes, **words)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(recipe: str, folder: Path, store: TaskStore, **settings: Any) -> RunFolder:
    overrides = {"tasks": {"store": str(store.root)}, "heldout.fraction": 0.4, "trl.max_steps": 1, **settings}
    _, code = run_recipe(RECIPES / recipe / "run.toml", overrides, folder, resume=False, quiet=True)
    assert code == 0
    return RunFolder(folder)


@pytest.mark.long
def test_episodes_and_held_out_episodes(tmp_path: Path, store: TaskStore) -> None:
    settings = {"agent.max_turns": 1, "agent.max_new_tokens": 2, "agent.min_new_tokens": 1}
    model = recurrent(tmp_path / "model", with_tools=True)
    folder = run("tiny-tools", tmp_path / "run", store, **{"model.name": model, **settings})
    (line,) = read_jsonl(folder.metrics)
    assert line["heldout/score"] is not None and line["rollouts/dropped"] == 0


@pytest.mark.long
def test_single_answers_and_held_out_answers(tmp_path: Path, store: TaskStore) -> None:
    model = recurrent(tmp_path / "model", with_tools=False)
    settings = {"model.name": model, "trl.max_completion_length": 4, "heldout.every": 1}
    folder = run("tiny-cpu", tmp_path / "run", store, **settings)
    (line,) = read_jsonl(folder.metrics)
    assert line["heldout/score"] is not None and line["loss"] is not None


def test_a_made_model_that_trl_would_load_again_is_refused() -> None:
    with pytest.raises(InputError, match=r"CR0701.*saved nowhere"):
        load_model(ModelSection(name="tiny-random"), seed=3, needs_reference=True)
    load_model(ModelSection(name="tiny-random", lora=LoraSection(rank=2)), seed=3, needs_reference=True)
