from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import EmptyMaskError, InputError
from composer_replication.losses.hint_distillation import (
    certainty_weights,
    decayed_weight,
    hint_distillation_loss,
)

# Two turns: means over unmasked tokens are 1.5 and 0.1; what is masked is not a number.
DIVERGENCE = torch.tensor([[1.0, 2.0, math.nan], [0.1, math.inf, 0.1]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])


def test_the_mean_over_unmasked_tokens_by_hand() -> None:
    divergence = DIVERGENCE.clone().requires_grad_()
    loss, metrics = hint_distillation_loss(divergence, MASK)
    assert loss.item() == pytest.approx(3.2 / 4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert divergence.grad is not None
    assert divergence.grad.tolist() == [[0.25, 0.25, 0.0], [0.25, 0.0, 0.25]]
    assert metrics.divergence.item() == pytest.approx(0.8)
    counts = (metrics.num_tokens, metrics.num_turns, metrics.num_open_turns)
    assert [value.item() for value in counts] == [4, 2, 2]


def test_token_and_turn_weights_by_hand() -> None:
    tokens = torch.tensor([[2.0, 0.5, math.nan], [1.0, -1.0, 3.0]])  # wrong ones stand under the mask
    loss, _ = hint_distillation_loss(
        DIVERGENCE, MASK, weight_BT=tokens, turn_weight_B=torch.tensor([1.0, 10.0])
    )
    assert loss.item() == pytest.approx((2 * 1 + 0.5 * 2 + 10 * (0.1 + 0.3)) / 4)


def test_a_closed_turn_gives_no_gradient_and_does_not_make_others_louder() -> None:
    divergence = DIVERGENCE.clone().requires_grad_()
    loss, metrics = hint_distillation_loss(divergence, MASK, gate_threshold=0.2)
    assert loss.item() == pytest.approx(3.0 / 4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert divergence.grad is not None
    assert divergence.grad.tolist() == [[0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]
    assert (metrics.num_turns.item(), metrics.num_open_turns.item()) == (2, 1)


def test_all_turns_closed_is_a_loss_of_exactly_nothing() -> None:
    divergence = DIVERGENCE.clone().requires_grad_()
    loss, metrics = hint_distillation_loss(divergence, MASK, gate_threshold=5.0)
    assert loss.item() == 0.0
    loss.backward()  # type: ignore[no-untyped-call]
    assert divergence.grad is not None
    assert not divergence.grad.any()
    assert metrics.num_open_turns.item() == 0


def test_no_token_at_all_is_an_error_and_an_empty_turn_is_not() -> None:
    with pytest.raises(EmptyMaskError, match="CR0722: no unmasked token"):
        hint_distillation_loss(DIVERGENCE, torch.zeros(2, 3))
    loss, metrics = hint_distillation_loss(DIVERGENCE, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert loss.item() == 1.5
    assert (metrics.num_turns.item(), metrics.num_open_turns.item()) == (1, 1)


def test_what_is_not_a_number_under_no_mask_is_shown() -> None:
    loss, metrics = hint_distillation_loss(DIVERGENCE, torch.ones(2, 3), gate_threshold=0.2)
    assert not math.isfinite(loss.item())
    assert metrics.num_open_turns.item() == 2


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10**6), turns=st.integers(1, 6), length=st.integers(1, 6), threshold=st.floats(0, 1)
)
def test_one_batch_equals_many(seed: int, turns: int, length: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    divergence = torch.rand(turns, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(turns, length, generator=generator) < 0.7
    mask[0, 0] = True
    weights = torch.rand(turns, length, generator=generator)
    whole, _ = hint_distillation_loss(divergence, mask, weight_BT=weights, gate_threshold=threshold)
    by_turn = sum(
        hint_distillation_loss(
            divergence[[row]],
            mask[[row]],
            weight_BT=weights[[row]],
            gate_threshold=threshold,
            num_tokens=mask.sum(),
        )[0]
        for row in range(turns)
        if mask[row].any()
    )
    torch.testing.assert_close(whole, by_turn)


def test_gradcheck() -> None:
    mask, weights = torch.tensor([[1, 0], [1, 1]]), torch.tensor([[0.5, 2.0], [1.0, 0.0]])
    divergence = torch.rand(2, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda values: hint_distillation_loss(values, mask, weight_BT=weights, gate_threshold=0.01)[0],
        divergence,
    )


def test_certainty_weights_by_hand() -> None:
    entropy = torch.tensor([0.0, math.log(2.0)], requires_grad=True)
    weights = certainty_weights(entropy, strength=2.0)
    assert weights.tolist() == pytest.approx([1.0, 0.25])
    assert not weights.requires_grad
    assert certainty_weights(entropy, strength=0.0).tolist() == [1.0, 1.0]


def test_at_the_threshold_the_gate_is_open() -> None:
    _, metrics = hint_distillation_loss(torch.tensor([[0.5], [0.4]]), torch.ones(2, 1), gate_threshold=0.5)
    assert metrics.num_open_turns.item() == 1
    _, metrics = hint_distillation_loss(torch.tensor([[-1e-9], [0.0]]), torch.ones(2, 1))
    assert metrics.num_open_turns.item() == 2, "threshold 0 is no gate"


def test_the_weight_decays_as_a_cosine() -> None:
    got = [decayed_weight(2.0, step=step, decay_steps=4) for step in (0, 1, 2, 4, 9)]
    assert got == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 0.0, 0.0])
    assert decayed_weight(2.0, step=9, decay_steps=0) == 2.0


def test_half_precision_sums_in_float32() -> None:
    divergence = torch.full((1, 4000), 0.1, dtype=torch.bfloat16)
    loss, _ = hint_distillation_loss(divergence, torch.ones(1, 4000))
    assert loss.item() == pytest.approx(float(torch.tensor(0.1, dtype=torch.bfloat16)), rel=1e-5)


def test_wrong_shapes_are_said() -> None:
    for options in ({"weight_BT": torch.ones(2, 2)}, {"turn_weight_B": torch.ones(3)}):
        with pytest.raises(InputError, match="CR0722"):
            hint_distillation_loss(DIVERGENCE, MASK, **options)
    with pytest.raises(InputError, match="CR0722"):
        hint_distillation_loss(DIVERGENCE, MASK[:1])
