"""Sharing a prompt changes the cost and nothing else: log-probabilities, entropies and gradients stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny_architectures import MODELS, tiny_model
from trl.trainer.utils import add_fused_lm_head

from composer_replication.trainer import packed_rows
from composer_replication.trainer.model_modes import inner_model, packing_reason
from composer_replication.trainer.packed_rows import shared_prefix_logps

VOCABULARY = 61


@dataclass
class Batch:
    """A GRPO batch as TRL lays it out: prompts padded left, completions right."""

    prompt_ids: torch.Tensor
    prompt_mask: torch.Tensor
    completion_ids: torch.Tensor
    completion_mask: torch.Tensor


def make_batch(groups: list[tuple[int, list[int]]], num_columns: int, seed: int) -> Batch:
    """Build shuffled rows of groups given as (prompt length, completion lengths)."""
    chooser = random.Random(seed)
    width = max(length for length, _ in groups) + 2  # two columns of padding in every row
    rows = []
    for length, completion_lengths in groups:
        prompt = [chooser.randrange(1, VOCABULARY) for _ in range(length)]
        for tokens in completion_lengths:
            # Padding columns hold arbitrary ids: only the mask may decide what counts.
            padding = [chooser.randrange(VOCABULARY) for _ in range(width - length)]
            completion = [chooser.randrange(1, VOCABULARY) for _ in range(num_columns)]
            mask = [0] * (width - length) + [1] * length
            rows.append((padding + prompt, mask, completion, [int(i < tokens) for i in range(num_columns)]))
    chooser.shuffle(rows)
    return Batch(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def plain_logps(
    model: torch.nn.Module, batch: Batch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward prompt and completion for every row, as TRL does it: the oracle."""
    ids = torch.cat([batch.prompt_ids, batch.completion_ids], dim=1)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logps_v = (logits[:, batch.prompt_ids.size(1) - 1 : -1].float() / temperature).log_softmax(-1)
    logps = logps_v.gather(-1, batch.completion_ids[..., None])[..., 0]
    entropies = -(logps_v.exp() * logps_v).sum(-1)
    hidden = batch.completion_mask == 0
    return logps.masked_fill(hidden, 0), entropies.masked_fill(hidden, 0)


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def assert_sharing_changes_nothing(model: torch.nn.Module, batch: Batch, *, temperature: float) -> None:
    """Compare values to 1e-5 and gradients to 1e-4 of the largest."""
    assert packing_reason(model) is None
    add_fused_lm_head(inner_model(model), temperature=temperature, outputs=("log_probs", "entropy"))
    plain, plain_entropies = plain_logps(model, batch, temperature)
    shared, entropies = shared_prefix_logps(
        model, batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
    )
    assert entropies is not None
    assert shared.shape == plain.shape == entropies.shape
    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, plain_entropies, rtol=0, atol=1e-5)
    weights = torch.randn(2, *plain.shape, generator=torch.Generator().manual_seed(0))
    expected = gradient(model, (plain * weights[0] + plain_entropies * weights[1]).sum())
    actual = gradient(model, (shared * weights[0] + entropies * weights[1]).sum())
    assert float((actual - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 5), min_size=1, max_size=4)), min_size=1, max_size=3
)
PACKED = [name for name in MODELS if name not in ("gemma3-hybrid", "gemma2-softcap", "gpt-oss-sinks")]
"""Those without sliding windows."""
UNEQUAL_GROUPS = [(13, [5, 0, 7]), (4, [7]), (9, [1, 3, 6, 2])]


def build(name: str) -> torch.nn.Module:
    return tiny_model(name, VOCABULARY).train()


def checkpointed(name: str) -> torch.nn.Module:
    model = tiny_model(name, VOCABULARY).train()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return build("llama")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_every_architecture_gives_the_plain_forward(name: str, checkpointing: bool) -> None:
    model = checkpointed(name) if checkpointing else build(name)
    assert_sharing_changes_nothing(model, make_batch(UNEQUAL_GROUPS, 7, seed=1), temperature=0.7)


def test_the_comparison_is_not_empty(llama: torch.nn.Module) -> None:
    batch = make_batch(UNEQUAL_GROUPS, 7, seed=1)
    logps, entropies = plain_logps(llama, batch, 1.0)
    assert float(gradient(llama, logps.sum()).abs().max()) > 1
    assert float(logps.detach().std()) > 0.5
    assert float(entropies.detach().std()) > 0.1


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=GROUPS,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    together=st.booleans(),
    at_most=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_any_groups_in_any_packs(
    llama: torch.nn.Module,
    groups: list[tuple[int, list[int]]],
    temperature: float,
    together: bool,
    at_most: int,
    seed: int,
) -> None:
    batch = make_batch(groups, 5, seed)
    if not batch.completion_mask.any():
        batch.completion_mask[0, 0] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_rows, "num_processes", lambda: 2 if together else 1)  # all packs in one forward
        patch.setattr(packed_rows, "rows_of_a_pack", lambda *_: at_most)
        assert_sharing_changes_nothing(llama, batch, temperature=temperature)


def _change_layout(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], Any]) -> None:
    original = packed_rows._laid_out

    def changed(*given: Any) -> dict[str, Any]:
        change(found := original(*given))
        return found

    monkeypatch.setattr(packed_rows, "_laid_out", changed)


def _see_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    def see(found: dict[str, Any]) -> None:
        if "attention_mask" in found:  # a pack of one row has none
            found["attention_mask"] = torch.ones_like(found["attention_mask"]).tril()

    _change_layout(monkeypatch, see)


def _go_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(found: dict[str, Any]) -> None:
        found["position_ids"] = torch.arange(found["input_ids"].size(1)).expand_as(found["input_ids"])

    _change_layout(monkeypatch, count)


@pytest.mark.parametrize("corrupt", [_see_neighbours, _go_on_counting])
def test_a_corrupted_pack_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, corrupt: Callable[[pytest.MonkeyPatch], None]
) -> None:
    corrupt(monkeypatch)
    with pytest.raises(AssertionError):
        assert_sharing_changes_nothing(
            checkpointed("llama"), make_batch(UNEQUAL_GROUPS, 7, seed=1), temperature=0.7
        )


def test_one_completion_column(llama: torch.nn.Module) -> None:
    assert_sharing_changes_nothing(llama, make_batch([(5, [1, 1]), (2, [1])], 1, seed=4), temperature=1.0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_gradients_reach_the_adapter_through_the_prompt(checkpointing: bool) -> None:
    model: Any = get_peft_model(
        tiny_model("qwen2", VOCABULARY),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False),
    ).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    assert_sharing_changes_nothing(model, make_batch(UNEQUAL_GROUPS, 7, seed=6), temperature=1.3)


def test_bfloat16_agrees_as_far_as_bfloat16_does() -> None:
    model = build("llama").bfloat16()
    batch = make_batch(UNEQUAL_GROUPS, 7, seed=7)
    exact, _ = plain_logps(build("llama").float(), batch, 1.0)
    plain, _ = plain_logps(model, batch, 1.0)
    add_fused_lm_head(model)
    shared, _ = shared_prefix_logps(
        model, batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
    )
    assert shared.dtype == torch.float32
    rounding = float((plain - exact).detach().abs().mean())
    assert float((shared - exact).detach().abs().mean()) < 2 * rounding
    assert gradient(model, shared.sum()).isfinite().all()
