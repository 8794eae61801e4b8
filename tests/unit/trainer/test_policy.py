"""The model in this process as a policy: its answers end where those of training do."""

from __future__ import annotations

import math

import pytest
import torch

from composer_replication.records import StopReason
from composer_replication.trainer.finite_sampling import NonFiniteSamplingError
from composer_replication.trainer.policy import InProcessPolicy, end_token_ids
from composer_replication.trainer.tiny_models import make_tiny_tools_model


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_no_wrong_answers(temperature: float) -> None:
    model, tokenizer = make_tiny_tools_model(0)
    with torch.no_grad():
        next(model.parameters()).fill_(math.inf)
    policy = InProcessPolicy(model.eval(), tokenizer)
    with pytest.raises(NonFiniteSamplingError) as caught:
        policy.generate(["def f():"], num_samples=2, max_new_tokens=3, temperature=temperature, seed=0)
    assert (caught.value.code, caught.value.where) == ("CR0779", "sampling")
