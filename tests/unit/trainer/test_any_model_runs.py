"""Models that cannot share prompts, and models made on the spot, go through whole runs of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from composer_replication.cli.train_verb import run_recipe
from composer_replication.config import LoraSection, ModelSection
from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.tiny_models import make_tiny_model, make_tiny_tools_model

pytestmark = pytest.mark.timeout(600)

RECIPES = Path(__file__).parents[3] / "recipes"
PINS = tuple(f"tinymath/numbers.py::{name}" for name in ("absolute", "clamp", "square"))
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 512,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mamba": lambda words: tf.MambaForCausalLM(
        tf.MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, **words)
    ),
    "phi3-longrope": lambda words: tf.Phi3ForCausalLM(
        tf.Phi3Config(**SIZES, **words, original_max_position_embeddings=512, rope_parameters=LONGROPE)
    ),
    "llama-dynamic": lambda words: tf.LlamaForCausalLM(
        tf.LlamaConfig(**SIZES, **words, rope_parameters=DYNAMIC)
    ),
}
NAMES = [
    "mamba",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("phi3-longrope", "llama-dynamic")),
]


@pytest.fixture(scope="module")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    return TaskStore.open(build_tiny(tmp_path_factory.mktemp("any-model") / "tasks", PINS))


def saved(name: str, folder: Path, *, with_tools: bool) -> str:
    _, tokenizer = (make_tiny_tools_model if with_tools else make_tiny_model)(0)
    words = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(0)
    MAKERS[name](words).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(recipe: str, folder: Path, store: TaskStore, **settings: Any) -> RunFolder:
    overrides = {"tasks": {"store": str(store.root)}, "heldout.fraction": 0.4, "trl.max_steps": 1, **settings}
    _, code = run_recipe(RECIPES / recipe / "run.toml", overrides, folder, resume=False, quiet=True)
    assert code == 0
    return RunFolder(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_episodes_and_held_out_episodes(name: str, tmp_path: Path, store: TaskStore) -> None:
    settings = {"agent.max_turns": 1, "agent.max_new_tokens": 2}
    model = saved(name, tmp_path / "model", with_tools=True)
    folder = run("tiny-tools", tmp_path / "run", store, **{"model.name": model, **settings})
    (line,) = read_jsonl(folder.metrics)
    assert line["heldout/score"] is not None and line["rollouts/dropped"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_single_answers_and_held_out_answers(name: str, tmp_path: Path, store: TaskStore) -> None:
    model = saved(name, tmp_path / "model", with_tools=False)
    settings = {"model.name": model, "trl.max_completion_length": 4, "heldout.every": 1}
    folder = run("tiny-cpu", tmp_path / "run", store, **settings)
    (line,) = read_jsonl(folder.metrics)
    assert line["heldout/score"] is not None and line["loss"] is not None


def test_a_made_model_that_trl_would_load_again_is_refused() -> None:
    with pytest.raises(InputError, match=r"CR0701.*saved nowhere"):
        load_model(ModelSection(name="tiny-random"), seed=3, needs_reference=True)
    load_model(ModelSection(name="tiny-random", lora=LoraSection(rank=2)), seed=3, needs_reference=True)
