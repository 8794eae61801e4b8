"""The cost of a step, as one step of a tiny model shows it."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import MambaConfig, MambaForCausalLM

from composer_replication.config import LoraSection
from composer_replication.errors import MissingError
from composer_replication.trainer import run_setup
from composer_replication.trainer.model_modes import parameter_sha256
from composer_replication.trainer.run_setup import (
    device_and_free_bytes,
    lora_config,
    measure_step,
    resident_bytes,
    within_memory,
)
from composer_replication.trainer.tiny_models import make_tiny_model


def test_a_step_changes_no_weight_and_its_memory_is_seen() -> None:
    plain, tokenizer = make_tiny_model(0)
    model = get_peft_model(plain, lora_config(LoraSection(rank=2))).eval()
    before = parameter_sha256(model)
    cost = measure_step(model, tokenizer, [8] * 400, num_prompts=1, group_size=8, completion_tokens=64)
    assert parameter_sha256(model) == before
    assert all(weight.grad is None for weight in model.parameters())
    assert cost.is_shared
    assert cost.seconds > 0
    assert 10**7 < cost.memory_bytes < 4 * resident_bytes()


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_step_is_in_proportion_to_what_was_tried(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of 2 with 4 prompt tokens and the 2 completion tokens of the try: 8 tokens, 12 where nothing is shared."""
    monkeypatch.setattr(run_setup, "packing_reason", lambda model: None if is_shared else "for this test")
    monkeypatch.setattr(run_setup, "_MOST_TRIED_TOKENS", 2)
    monkeypatch.setattr(run_setup, "_taken", lambda model, work: (work(), 1.5, 1048))
    monkeypatch.setattr(run_setup, "resident_bytes", lambda: 1000)
    plain, tokenizer = make_tiny_model(0)
    frozen = plain.requires_grad_(False)
    frozen.get_input_embeddings().weight.requires_grad_(True)
    num_trained = frozen.get_input_embeddings().weight.numel()
    cost = measure_step(plain, tokenizer, [1] * 4, num_prompts=3, group_size=2, completion_tokens=10)
    whole, tried = (4 + 20, 8) if is_shared else (8 + 20, 12)
    assert cost.memory_bytes == round(1000 + 8 * num_trained + 3 * 48 * whole / tried)
    assert cost.seconds == pytest.approx(3 * (1.5 * 10 / 2 + 1.5 * whole / tried))


def test_a_model_that_cannot_share_prompts_is_tried_as_it_trains() -> None:
    _, tokenizer = make_tiny_model(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1))
    assert not measure_step(
        model, tokenizer, [5, 6, 7], num_prompts=1, group_size=2, completion_tokens=2
    ).is_shared


def test_graphics_memory_that_runs_out_is_a_sentence() -> None:
    with pytest.raises(MissingError, match="CR0232"), within_memory("big"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="another"), within_memory("big"):
        raise RuntimeError("another")


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of the processor")
def test_what_is_free_counts_what_this_process_holds() -> None:
    device, free = device_and_free_bytes(10**9)
    assert free is not None
    assert free > 10**9 + 10**7
    assert (device, None) == device_and_free_bytes(None)
