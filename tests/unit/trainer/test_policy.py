"""The model in this process as a policy: its answers end where those of training do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from composer_replication.config import load_config
from composer_replication.errors import InputError
from composer_replication.records import StopReason
from composer_replication.trainer.policy import (
    GrowingText,
    InProcessPolicy,
    end_token_ids,
    take_end_of_template,
)
from composer_replication.trainer.preset_settings import sampling_settings
from composer_replication.trainer.tiny_models import make_tiny_tools_model

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"


def test_an_answer_ends_at_each_end_token_of_the_model() -> None:
    model, tokenizer = make_tiny_tools_model(0)

    def answer() -> tuple[tuple[int, ...], StopReason]:
        policy = InProcessPolicy(model.eval(), tokenizer)
        [[said]] = policy.generate(["def f"], num_samples=1, max_new_tokens=4, temperature=0, seed=0)
        return said.token_ids, said.stop_reason

    model.generation_config.eos_token_id = None
    ids, reason = answer()
    assert (len(ids), reason) == (4, StopReason.LENGTH)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, ids[0]]
    assert answer() == (ids[:1], StopReason.FINISHED)
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, ids[0]]
    model.generation_config.eos_token_id = ids[0]
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, ids[0]]


def test_the_end_of_an_answer_in_the_chat_template_ends_one() -> None:
    model, tokenizer = make_tiny_tools_model(0)
    tokenizer.add_tokens(["<|end of turn|>"], special_tokens=True)
    end = len(tokenizer) - 1
    model.resize_token_embeddings(len(tokenizer))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end of turn|>\n{% endfor %}"
    )
    take_end_of_template(model, tokenizer)
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, end]
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    take_end_of_template(model, tokenizer)
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, end]


def test_samples_are_filtered_as_in_training() -> None:
    model, tokenizer = make_tiny_tools_model(0)
    sampling = sampling_settings(load_config(RECIPE, {"trl.top_k": 1, "trl.temperature": 0.9}))
    assert (sampling.top_k, sampling.temperature, sampling.top_p, sampling.min_p) == (1, 0.9, 1.0, None)

    def distinct(policy: InProcessPolicy) -> int:
        [said] = policy.generate(["def f"], num_samples=8, max_new_tokens=4, temperature=1.0, seed=0)
        return len({each.token_ids for each in said})

    assert distinct(InProcessPolicy(model.eval(), tokenizer, sampling=sampling)) == 1
    assert distinct(InProcessPolicy(model.eval(), tokenizer)) > 1


def test_only_what_is_new_of_an_answer_is_decoded() -> None:
    _, tokenizer = make_tiny_tools_model(0)
    num_decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        num_decoded.append(len(ids))
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    ids = tokenizer("def f():\n    return '\u00e9\u4e2d\U0001f600' # " + "x y " * 40)["input_ids"]
    text = GrowingText(decode)
    for end in range(1, len(ids) + 1):
        assert text.of(ids[:end]) == tokenizer.decode(ids[:end], skip_special_tokens=True)
    assert max(num_decoded) <= 12


def test_an_answer_ends_where_its_text_is_finished() -> None:
    model, tokenizer = make_tiny_tools_model(0)
    texts: list[str] = []

    def is_finished(text: str) -> bool:
        texts.append(text)
        return len(texts) == 3

    options = {"num_samples": 1, "max_new_tokens": 6, "temperature": 0, "seed": 0}
    [[said]] = InProcessPolicy(model.eval(), tokenizer).generate(
        ["def f"], is_finished=is_finished, **options
    )
    assert said.stop_reason is StopReason.STOP_RULE
    ids = said.token_ids
    assert texts == [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(1, 4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_no_wrong_answers(temperature: float) -> None:
    model, tokenizer = make_tiny_tools_model(0)
    with torch.no_grad():
        next(model.parameters()).fill_(math.inf)
    policy = InProcessPolicy(model.eval(), tokenizer)
    with pytest.raises(InputError) as caught:
        policy.generate(["def f():"], num_samples=2, max_new_tokens=3, temperature=temperature, seed=0)
    assert (caught.value.code, caught.value.where) == ("CR0770", "sampling")
