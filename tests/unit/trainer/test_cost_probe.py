"""The cost of a step: proportions by hand, the try on a tiny model."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import MambaConfig, MambaForCausalLM

from composer_replication.config import LoraSection
from composer_replication.errors import MissingError
from composer_replication.trainer import model_trial
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.model_trial import (
    StepCost,
    StepSize,
    measure_step,
    resident_bytes,
    training_device,
    within_memory,
)
from composer_replication.trainer.run_setup import lora_config
from composer_replication.trainer.tiny_models import make_tiny_model

COST = StepCost(
    tried=StepSize(1, 4, 10, 5),  # 10 + 4 x 5 = 30 tokens, 4 rows
    sampling_seconds=1.5,
    training_seconds=2.4,
    held_bytes=7000,
    step_bytes=3000,
)


def test_sizes() -> None:
    assert StepSize(2, 4, 10, 5).num_rows == 8
    assert StepSize(2, 4, 10, 5).num_tokens == 60
    assert StepSize(2, 4, 10, 5, is_shared=False).num_tokens == 120


def test_proportions_by_hand() -> None:
    size = StepSize(2, 4, 25, 10)  # 2 x (25 + 4 x 10) = 130 tokens, 80 of them of completions
    assert COST.memory_bytes(size) == 7000 + 3000 * 130 / 30
    assert COST.sampling_seconds_of(size) == pytest.approx(1.5 * 80 / 20)
    assert COST.training_seconds_of(size) == pytest.approx(2.4 * 130 / 30)


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_try_changes_no_weight_and_sees_the_memory_of_a_step(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_shared:
        monkeypatch.setattr(model_trial, "packing_reason", lambda model: "for this test")
    plain, tokenizer = make_tiny_model(0)
    model = get_peft_model(plain, lora_config(LoraSection(rank=2))).eval()
    before = parameter_sha256(model)
    cost = measure_step(model, tokenizer, [8] * 400, group_size=8, completion_tokens=200)
    assert parameter_sha256(model) == before
    assert all(weight.grad is None for weight in model.parameters())
    assert cost.tried == StepSize(1, 8, 400, 64, is_shared)
    assert min(cost.sampling_seconds, cost.training_seconds) > 0
    assert 10**7 < cost.held_bytes < 2 * resident_bytes()
    assert cost.step_bytes < cost.held_bytes


def test_a_model_that_cannot_share_prompts_is_tried_as_it_trains() -> None:
    _, tokenizer = make_tiny_model(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1))
    cost = measure_step(model, tokenizer, [5, 6, 7], group_size=2, completion_tokens=2)
    assert not cost.tried.is_shared


def test_graphics_memory_that_runs_out_is_a_sentence() -> None:
    with pytest.raises(MissingError, match="CR0232"), within_memory("big"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="another"), within_memory("big"):
        raise RuntimeError("another")


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of the processor")
def test_what_is_free_counts_what_this_process_holds() -> None:
    free = training_device(10**9).free_bytes
    assert free is not None
    assert free > 10**9 + 10**7
    assert training_device(None).free_bytes is None
