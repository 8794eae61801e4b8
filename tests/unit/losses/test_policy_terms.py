from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError, UsageError
from composer_replication.losses.policy_terms import (
    effective_share,
    effort_cost,
    fold_kl_into_advantages,
    k1_per_rollout,
    truncated_importance_weights,
)


def test_k1_by_hand() -> None:
    policy = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, -1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, 0.0], [-3.0, math.inf, -1.0]])
    kl = k1_per_rollout(policy, reference, torch.tensor([[1, 1, 0], [1, 0, 1]]))
    assert kl.tolist() == [-0.5, 2.0]
    assert not kl.requires_grad
    assert k1_per_rollout(policy, reference, torch.zeros(2, 3)).tolist() == [0.0, 0.0]
    with pytest.raises(InputError, match="CR0722"):
        k1_per_rollout(policy, reference[:1], torch.zeros(2, 3))


def test_the_kl_is_centred_in_its_group_by_hand() -> None:
    advantages = torch.tensor([0.5, -0.5, 1.0, -1.0])
    got = fold_kl_into_advantages(advantages, torch.tensor([1.0, 3.0, 10.0, 10.0]), beta=0.1, group_size=2)
    assert got.tolist() == pytest.approx([0.6, -0.6, 1.0, -1.0])
    assert fold_kl_into_advantages(advantages, torch.ones(4), beta=0.0, group_size=2).equal(advantages)


def test_a_rollout_that_is_left_out_does_not_move_its_group() -> None:
    got = fold_kl_into_advantages(
        torch.zeros(3),
        torch.tensor([1.0, 2.0, math.nan]),
        beta=1.0,
        group_size=3,
        valid_B=torch.tensor([1, 1, 0]),
    )
    assert got.tolist() == [0.5, -0.5, 0.0]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), groups=st.integers(0, 4), size=st.integers(1, 5), shift=st.floats(-50, 50))
def test_folding_keeps_group_means_and_forgets_what_a_group_shares(
    seed: int, groups: int, size: int, shift: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    advantages, kl = torch.randn(2, groups * size, generator=generator, dtype=torch.float64)
    got = fold_kl_into_advantages(advantages, kl, beta=0.3, group_size=size)
    shifted = fold_kl_into_advantages(advantages, kl + shift, beta=0.3, group_size=size)
    torch.testing.assert_close(got, shifted)
    torch.testing.assert_close(got.view(-1, size).mean(1), advantages.view(-1, size).mean(1))


def test_folding_gives_the_gradient_of_the_reverse_kl() -> None:
    """Three answers, in full expectation: the policy gradient of -beta K is that of -beta KL(p || ref)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logp = logits.log_softmax(-1)
    kl = (logp.exp() * (logp - reference)).sum()
    (exact,) = torch.autograd.grad(-0.7 * kl, logits, retain_graph=True)
    expected = torch.zeros(3, dtype=torch.float64)
    for one in range(3):  # a group of two independent answers; centring over G leaves (G - 1) / G of it
        for two in range(3):
            pair = torch.tensor([one, two])
            k1 = k1_per_rollout(logp[pair, None], reference[pair, None], torch.ones(2, 1))
            advantages = fold_kl_into_advantages(torch.zeros_like(k1), k1, beta=0.7, group_size=2)
            (gradient,) = torch.autograd.grad((advantages * logp[pair]).mean(), logits, retain_graph=True)
            expected += (logp[one] + logp[two]).exp().detach() * gradient
    torch.testing.assert_close(2 * expected, exact)


def test_wrong_groups_are_said() -> None:
    for size in (0, 3):
        with pytest.raises(UsageError, match=f"4 rollouts are not whole groups of {size}"):
            fold_kl_into_advantages(torch.zeros(4), torch.zeros(4), beta=0.1, group_size=size)
    with pytest.raises(InputError, match="CR0722"):
        fold_kl_into_advantages(torch.zeros(4), torch.zeros(3), beta=0.1, group_size=2)
    with pytest.raises(InputError, match="CR0722"):
        fold_kl_into_advantages(torch.zeros(4), torch.zeros(4), beta=0.1, group_size=2, valid_B=torch.ones(2))


@pytest.mark.parametrize(
    ("scale", "curvature", "expected"),
    [
        (0.0, 0.5, 8.0),
        (2.0, 0.0, 8.0),
        (1.0, 1.0, math.log(9.0)),
        (1.0, 0.5, (3.0 - 1) / 0.5),
        (1.0, 2.0, 8 / 9),
        (3.0, 1.0, math.log(25.0) / 3),
    ],
)
def test_effort_by_hand(scale: float, curvature: float, expected: float) -> None:
    cost = effort_cost(torch.tensor([0.0, 8.0], dtype=torch.float64), scale=scale, curvature=curvature)
    assert cost.tolist() == pytest.approx([0.0, expected], rel=1e-14)


@settings(deadline=None, max_examples=80)
@given(
    x=st.floats(1e-9, 1e6),
    scale=st.floats(1e-12, 1e3),
    curvature=st.one_of(st.floats(0, 4), st.sampled_from([1 - 1e-9, 1 + 1e-12])),
)
def test_effort_equals_the_formula_in_fifty_digits(x: float, scale: float, curvature: float) -> None:
    with localcontext() as context:
        context.prec = 60
        grown, power = 1 + Decimal(scale) * Decimal(x), 1 - Decimal(curvature)
        exact = grown.ln() / Decimal(scale) if power == 0 else (grown**power - 1) / (Decimal(scale) * power)
    cost = effort_cost(torch.tensor(x, dtype=torch.float64), scale=scale, curvature=curvature)
    assert cost.item() == pytest.approx(float(exact), rel=1e-12)


LN2 = math.log(2.0)
TRAIN = torch.tensor([[0.0, LN2, 2 * LN2, math.nan]])
MASK = torch.tensor([[1, 1, 1, 0]])


def test_importance_weights_by_hand() -> None:
    weights, metrics = truncated_importance_weights(
        TRAIN.requires_grad_(), torch.tensor([[0.0, 0.0, math.nan, 0.0]]), MASK, clip=1.5
    )
    assert weights[0].tolist() == [1.0, 1.5, 1.0, 1.0]
    assert not weights.requires_grad
    assert metrics.masked_share.item() == 0.5
    assert metrics.effective_sample_share.item() == pytest.approx(2.5**2 / (2 * 3.25))


def test_importance_weights_equal_trl() -> None:
    from trl.experimental.sdpo.loss_utils import apply_importance_sampling_clipping

    logp, sampled, loss = (5 * torch.randn(4, 6) for _ in range(3))
    want = apply_importance_sampling_clipping(loss, logp, sampled, 2.0)
    weights, _ = truncated_importance_weights(logp, sampled, torch.ones(4, 6))
    torch.testing.assert_close(weights * loss, want, rtol=1e-5, atol=1e-7)


def test_a_far_drift_stays_finite() -> None:
    weights, metrics = truncated_importance_weights(
        torch.zeros(1, 2), torch.tensor([[-1e30, -1.0]]), torch.ones(1, 2)
    )
    assert weights.tolist() == [[2.0, 2.0]]
    assert math.isfinite(metrics.effective_sample_share.item())


def test_effective_share_of_one_and_of_none() -> None:
    assert effective_share(torch.tensor([5.0, 0.0, 0.0, 0.0])).item() == pytest.approx(0.25)
    assert effective_share(torch.zeros(4)).item() == 0.0


def test_no_token_weighs_nothing_and_wrong_shapes_are_said() -> None:
    weights, metrics = truncated_importance_weights(TRAIN, TRAIN, torch.zeros(1, 4))
    assert weights.equal(torch.ones(1, 4))
    assert (metrics.masked_share.item(), metrics.effective_sample_share.item()) == (0.0, 1.0)
    with pytest.raises(InputError, match="CR0722"):
        truncated_importance_weights(TRAIN, TRAIN[:, :1], MASK)
