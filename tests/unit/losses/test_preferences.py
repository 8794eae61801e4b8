from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import EmptyMaskError, InputError, UsageError
from composer_replication.losses.preferences import PreferenceKind, preference_loss, sequence_logp


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def four(seed: int, pairs: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-3 * torch.rand(pairs, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


# h = ((-1) - (-1.5)) - ((-2) - (-1)) = 0.5 + 1 = 1.5
HAND = column(-1.0), column(-2.0), column(-1.5), column(-1.0)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("dpo", {"beta": 0.1}, -log_sigmoid(0.15)),
        ("dpo", {"beta": 2.0, "margin": 0.5}, -log_sigmoid(2.5)),
        ("ipo", {"beta": 0.25}, (1.5 - 2.0) ** 2),
        ("simpo", {"beta": 2.0, "margin": 1.0}, -log_sigmoid(1.0)),
    ],
)
def test_one_pair_by_hand(kind: PreferenceKind, options: dict[str, float], expected: float) -> None:
    loss, metrics = preference_loss(*HAND, kind=kind, **options)
    assert loss.item() == pytest.approx(expected, rel=1e-14)
    assert metrics.accuracy.item() == 1.0
    beta = options["beta"]
    rewards = (-beta, -2 * beta) if kind == "simpo" else (0.5 * beta, -beta)
    assert (metrics.chosen_reward.item(), metrics.rejected_reward.item()) == pytest.approx(rewards)
    assert metrics.reward_margin.item() == pytest.approx(rewards[0] - rewards[1])


def test_the_weighted_mean_by_hand() -> None:
    chosen, rejected = column(1.0, -1.0, math.nan), column(0.0, 0.0, math.inf)
    chosen.requires_grad_()
    loss, metrics = preference_loss(
        chosen, rejected, None, None, kind="simpo", beta=1.0, weight_P=torch.tensor([3.0, 1.0, 0.0])
    )
    assert loss.item() == pytest.approx((-3 * log_sigmoid(1.0) - log_sigmoid(-1.0)) / 4)
    assert metrics.accuracy.item() == 0.75
    assert (metrics.total_weight.item(), metrics.num_pairs.item()) == (4.0, 2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert chosen.grad is not None
    slope = 1 / (1 + math.exp(1.0))
    assert chosen.grad.tolist() == pytest.approx([-0.75 * slope, -0.25 * (1 - slope), 0.0])


@pytest.fixture(scope="module")
def trl_loss() -> Any:
    """TRL's own lines; with the reference subtracted beforehand, its CPO losses are DPO and IPO."""
    from trl.experimental.cpo import CPOTrainer

    def loss(chosen: torch.Tensor, rejected: torch.Tensor, loss_type: str, **settings: float) -> torch.Tensor:
        trainer = SimpleNamespace(
            accelerator=SimpleNamespace(device="cpu"),
            alpha=0.0,
            loss_type=loss_type,
            beta=settings["beta"],
            simpo_gamma=settings.get("margin", 0.0),
            label_smoothing=0.0,
        )
        return CPOTrainer.cpo_loss(cast("Any", trainer), chosen, rejected)[0].mean()

    return loss


@pytest.mark.parametrize(
    ("kind", "their_name", "options"),
    [
        ("dpo", "sigmoid", {"beta": 0.3}),
        ("ipo", "ipo", {"beta": 0.3}),
        ("simpo", "simpo", {"beta": 2.0, "margin": 0.7}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_equal_trl(
    trl_loss: Any, kind: PreferenceKind, their_name: str, options: dict[str, float], dtype: torch.dtype
) -> None:
    for seed in range(5):
        chosen, rejected, reference_chosen, reference_rejected = four(seed, 7, dtype)
        ours = [tensor.clone().requires_grad_() for tensor in (chosen, rejected)]
        theirs = [tensor.clone().requires_grad_() for tensor in (chosen, rejected)]
        got, _ = preference_loss(ours[0], ours[1], reference_chosen, reference_rejected, kind=kind, **options)
        shift = (0.0, 0.0) if kind == "simpo" else (reference_chosen, reference_rejected)
        want = trl_loss(theirs[0] - shift[0], theirs[1] - shift[1], their_name, **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        for mine, other in zip(
            torch.autograd.grad(got, ours), torch.autograd.grad(want, theirs), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(["dpo", "ipo", "simpo"]),
    scale=st.floats(0.01, 100),
    data=st.data(),
)
def test_weights_mean_repetition_and_their_scale_does_not_matter(
    seed: int, kind: PreferenceKind, scale: float, data: st.DataObject
) -> None:
    repeats = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any))
    columns = four(seed, len(repeats))
    times = torch.tensor(repeats)
    weighted, metrics = preference_loss(*columns, kind=kind, beta=0.5, weight_P=scale * times.double())
    repeated, plain = preference_loss(
        *(value.repeat_interleave(times) for value in columns), kind=kind, beta=0.5
    )
    torch.testing.assert_close(weighted, repeated)
    torch.testing.assert_close(metrics.accuracy, plain.accuracy)
    torch.testing.assert_close(metrics.reward_margin, plain.reward_margin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    columns = [200 * value for value in four(1, 6, dtype)]
    got, _ = preference_loss(*columns, kind="dpo", beta=0.1)
    want, _ = preference_loss(*(value.double() for value in columns), kind="dpo", beta=0.1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


def test_extreme_gaps_stay_finite_and_an_infinite_one_is_seen() -> None:
    far = torch.tensor([-5000.0], requires_grad=True)
    loss, _ = preference_loss(far, torch.zeros(1), None, None, kind="simpo", beta=2.0)
    assert loss.item() == 10000.0
    loss.backward()  # type: ignore[no-untyped-call]
    assert far.grad is not None
    assert far.grad.tolist() == [-2.0]
    loss, _ = preference_loss(torch.tensor([-math.inf]), torch.zeros(1), None, None, kind="simpo", beta=2.0)
    assert loss.item() == math.inf


def test_references_and_weights_carry_no_gradient() -> None:
    columns = [value.requires_grad_() for value in four(1, 3)]
    weights = torch.ones(3, requires_grad=True)
    loss, _ = preference_loss(*columns, kind="dpo", beta=0.1, weight_P=weights)
    gradients = torch.autograd.grad(loss, [*columns, weights], allow_unused=True)
    assert [gradient is not None for gradient in gradients] == [True, True, False, False, False]


def test_wrong_arguments_are_said() -> None:
    columns = four(1, 3)
    with pytest.raises(UsageError, match="compares with a reference"):
        preference_loss(columns[0], columns[1], None, columns[3], kind="dpo", beta=0.1)
    with pytest.raises(InputError, match="CR0722"):
        preference_loss(columns[0], columns[1][:2], columns[2], columns[3], kind="dpo", beta=0.1)
    with pytest.raises(EmptyMaskError, match="no pair with a weight above 0"):
        preference_loss(*columns, kind="dpo", beta=0.1, weight_P=torch.zeros(3))
    with pytest.raises(EmptyMaskError, match="CR0722"):
        preference_loss(*(value[:0] for value in columns), kind="dpo", beta=0.1)


def test_sequence_logp_reads_unmasked_tokens_alone() -> None:
    logp = torch.tensor([[-1.0, -2.0, math.nan], [-4.0, -math.inf, -2.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    summed = sequence_logp(logp, mask, length_normalised=False)
    assert summed.tolist() == [-3.0, -6.0]
    assert sequence_logp(logp, mask, length_normalised=True).tolist() == [-1.5, -3.0]
    summed.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert logp.grad.tolist() == [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    with pytest.raises(EmptyMaskError, match="no token of answer 1"):
        sequence_logp(logp, torch.tensor([[1, 1, 0], [0, 0, 0]]), length_normalised=True)
    with pytest.raises(InputError, match="CR0722"):
        sequence_logp(logp, mask[:, :2], length_normalised=True)
