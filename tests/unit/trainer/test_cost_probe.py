"""The cost of a step: formulas by hand, the probe on a tiny model."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import MambaConfig, MambaForCausalLM

from composer_replication.config import LoraSection
from composer_replication.errors import MissingError
from composer_replication.trainer import cost_probe
from composer_replication.trainer.cost_probe import ModelCosts, StepSize, measure_costs
from composer_replication.trainer.model_trial import training_device, within_memory
from composer_replication.trainer.parameter_hash import parameter_sha256
from composer_replication.trainer.run_setup import lora_config
from composer_replication.trainer.tiny_models import make_tiny_model

COSTS = ModelCosts(
    probed=StepSize(1, 4, 10, 5),  # 10 + 4 x 5 = 30 tokens, 4 rows
    prefill_seconds=1.0,
    token_seconds=0.1,
    backward_seconds=2.0,
    forward_seconds=0.4,
    saved_bytes=3000,
    weight_bytes=7000,
    trained_numbers=100,
    cache_token_bytes=2,
    vocabulary=11,
)


def test_sizes() -> None:
    assert StepSize(2, 4, 10, 5).num_rows == 8
    assert StepSize(2, 4, 10, 5).group_tokens == 30
    assert StepSize(2, 4, 10, 5, is_shared=False).group_tokens == 60


def test_memory_by_hand() -> None:
    # 7000 + 12 x 100 + 2 x (3000 + 8 x 4 x 5 x 11)
    assert COSTS.memory_bytes(StepSize(2, 4, 10, 5)) == 7000 + 1200 + 2 * (3000 + 1760)
    # completion tokens twice as many: 50 / 30 tokens, but 40 / 20 completion tokens, which counts
    assert COSTS.memory_bytes(StepSize(1, 4, 10, 10)) == 7000 + 1200 + 6000 + 3520
    # a long prompt: 130 / 30 tokens
    assert COSTS.memory_bytes(StepSize(1, 4, 110, 5)) == 7000 + 1200 + 13000 + 1760


def test_memory_of_the_cache_where_it_is_the_larger_part() -> None:
    costs = ModelCosts(**{**{f: getattr(COSTS, f) for f in COSTS.__slots__}, "cache_token_bytes": 1000})
    assert costs.memory_bytes(StepSize(2, 4, 10, 5)) == 7000 + 1200 + 8 * 15 * 1000


def test_seconds_by_hand() -> None:
    size = StepSize(2, 4, 25, 5)  # 45 tokens a group, 8 rows
    assert COSTS.sampling_seconds(size) == pytest.approx((1.0 + 5 * 0.1) * 8 / 4)
    assert COSTS.training_seconds(size) == pytest.approx(2 * 2.4 * 45 / 30)


def test_what_autograd_keeps_is_counted_once_and_without_weights() -> None:
    x = torch.ones(1000, requires_grad=True)
    weight = torch.ones(1000, requires_grad=True)
    # exp keeps its result: twice 4000 bytes. The product keeps its factors: one is known, one is the weight.
    left_out = {weight.untyped_storage().data_ptr()}
    assert cost_probe._saved_bytes(lambda: x.exp().exp() * weight, left_out) == 8000
    assert cost_probe._saved_bytes(lambda: x.exp().exp() * weight, set()) == 12000
    with torch.no_grad():
        assert cost_probe._saved_bytes(lambda: x.exp(), set()) == 0


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_probe_changes_no_weight_and_counts_what_is_there(
    is_shared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_shared:
        monkeypatch.setattr(cost_probe, "unsupported_reason", lambda model: "for this test")
    plain, tokenizer = make_tiny_model(0)
    num_plain = sum(weight.numel() for weight in plain.parameters())
    model = get_peft_model(plain, lora_config(LoraSection(rank=2))).eval()
    before = parameter_sha256(model)
    costs = measure_costs(model, tokenizer, [[5, 6, 7], [8] * 12], group_size=4, completion_tokens=200)
    assert parameter_sha256(model) == before
    assert all(weight.grad is None for weight in model.parameters())
    assert costs.probed == StepSize(2, 4, 12, 64, is_shared)
    # two layers of rank 2: q and o 64+64, k and v 64+32, gate and up 64+128, down 128+64
    assert costs.trained_numbers == 2 * 2 * (2 * 128 + 2 * 96 + 3 * 192)
    assert costs.weight_bytes == 4 * (num_plain + costs.trained_numbers)
    assert costs.cache_token_bytes == 2 * 2 * 2 * 16 * 4
    assert costs.vocabulary == 258
    assert costs.saved_bytes > 4 * 64 * 258 * 4  # at least the logits of the completions
    assert min(costs.backward_seconds, costs.forward_seconds) > 0


def test_prompts_that_are_not_shared_keep_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tokenizer = make_tiny_model(0)
    model = get_peft_model(plain, lora_config(LoraSection(rank=2))).eval()
    prompts = [[5] * 200]
    shared = measure_costs(model, tokenizer, prompts, group_size=4, completion_tokens=4)
    monkeypatch.setattr(cost_probe, "unsupported_reason", lambda model: "for this test")
    alone = measure_costs(model, tokenizer, prompts, group_size=4, completion_tokens=4)
    assert alone.saved_bytes > 2 * shared.saved_bytes


def test_a_model_without_attention_has_no_cache_that_grows() -> None:
    _, tokenizer = make_tiny_model(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1))
    costs = measure_costs(model, tokenizer, [[5, 6, 7]], group_size=2, completion_tokens=2)
    assert costs.cache_token_bytes == 0 and not costs.probed.is_shared


def test_graphics_memory_that_runs_out_is_a_sentence() -> None:
    with pytest.raises(MissingError, match="CR0232"), within_memory("big"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="another"), within_memory("big"):
        raise RuntimeError("another")


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of the processor")
def test_what_is_free_counts_what_this_process_holds() -> None:
    device = training_device(10**9)
    assert device.free_bytes == 10**9 + device.held_bytes
    assert device.held_bytes > 10**7
    assert training_device(None).free_bytes is None
