"""Prompts that rows of a channel have in common are forwarded once, and what the head reads stays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "invariants"))

from tiny_architectures import tiny_model

from composer_replication.records import PreferencePair
from composer_replication.trainer import packed_rows as module
from composer_replication.trainer.collator import TokenRows, collate_pairs
from composer_replication.trainer.packed_rows import completion_states

PAIRS = (
    PreferencePair((5, 6, 7, 8, 9), (40, 41, 42), (43,)),
    PreferencePair((8, 3), (50,), (51, 52, 53, 54)),
    PreferencePair((5, 6, 7, 8, 9), (44, 45), (46, 47)),
)


def rows_of(*pairs: PreferencePair) -> TokenRows:
    return collate_pairs(pairs, pad_id=0).stacked()


def forwarded(model: Any, rows: TokenRows) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """The states, and the shapes of what the model read."""
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda _model, _args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    states = completion_states(model, rows)
    hook.remove()
    return states, shapes


@pytest.mark.parametrize(
    "name", ["llama-eager", "qwen3", "gemma3-hybrid", "deepseek-v3-latent", "granite-divided"]
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_pairs_share_their_prompts(name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name, 61).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    rows = rows_of(*PAIRS)
    rows.loss_mask_NT[0, 0] = 0  # a token that carries no loss
    shared, shapes = forwarded(model, rows)
    assert shapes == [(2, 4 + 3 + 1 + 2 + 2)]  # the prompt's last token comes once for each answer
    monkeypatch.setattr(module, "packing_reason", lambda _: "not now.")
    plain, shapes = forwarded(model, rows)
    assert shapes == [(6, 9)]
    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-5)
    weights = torch.randn(shared.shape, generator=torch.Generator().manual_seed(0))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for one, other in zip(
        *(
            torch.autograd.grad(
                (states * weights).sum(), parameters, allow_unused=True, materialize_grads=True
            )
            for states in (shared, plain)
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_rows_of_different_prompts_go_together() -> None:
    first, second = PAIRS[:2]
    rows = rows_of(first, second)
    one_of_each = TokenRows(*(getattr(rows, name)[:2] for name in TokenRows.__dataclass_fields__))
    _, shapes = forwarded(tiny_model("llama", 61), one_of_each)
    assert shapes == [(2, 9)]


def test_with_dropout_every_row_is_forwarded() -> None:
    model = tiny_model("llama", 61).train()
    model.config.attention_dropout = 0.1
    _, shapes = forwarded(model, rows_of(*PAIRS))
    assert shapes == [(6, 9)]
