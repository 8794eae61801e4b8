"""Models and prompts that cannot be trained on are refused when they are loaded, each in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaModel

from composer_replication.config import ModelSection
from composer_replication.errors import InputError
from composer_replication.trainer.model_loading import load_model
from composer_replication.trainer.policy import InProcessPolicy
from composer_replication.trainer.run_setup import refuse_long_prompts
from composer_replication.trainer.tiny_models import make_tiny_model

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


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_loads(tmp_path: Path, tied: bool) -> None:
    model, tokenizer = load(saved(tmp_path, tied=tied))
    assert tokenizer.padding_side == "left"
    assert next(model.parameters()).dtype == torch.float32


def test_a_base_model_without_its_head(tmp_path: Path) -> None:
    saved(tmp_path, tied=False, base_only=True)
    assert isinstance(LlamaModel.from_pretrained(tmp_path), LlamaModel)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert caught.value.code == "CR0701"
    assert "lm_head.weight would be random" in caught.value.message


def test_a_base_model_whose_head_is_its_embedding_is_whole(tmp_path: Path) -> None:
    model, _ = load(saved(tmp_path, tied=True, base_only=True))
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)


def test_a_vision_language_model(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    Gemma3Config().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"CR0701.*a gemma3 model reads images or sound"):
        load(tmp_path)


def test_a_tokenizer_without_pad_and_end(tmp_path: Path) -> None:
    saved(tmp_path)
    _, tokenizer = make_tiny_model(0)
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="CR0701"):
        load(tmp_path)


def test_a_tokenizer_without_a_padding_token_pads_with_its_end(tmp_path: Path) -> None:
    saved(tmp_path)
    _, tokenizer = make_tiny_model(0)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path)[1].pad_token == "<eos>"


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
        refuse_long_prompts(plain, model, tokenizer, max_new_tokens=3)


def test_a_template_that_raises() -> None:
    model, tokenizer = make_tiny_model(0)
    tokenizer.chat_template = "{{ raise_exception('only system messages') }}"
    rows = [{"prompt": [{"role": "user", "content": "x"}], "task_id": "one"}]
    with pytest.raises(InputError, match=r"CR0810.*does not take the conversation: only system messages"):
        refuse_long_prompts(rows, model, tokenizer, max_new_tokens=4)
    with pytest.raises(InputError, match="CR0810"):
        InProcessPolicy(model, tokenizer, as_chat=True).prompt_ids("x")
