"""Against values worked out by hand and against TRL's own arithmetic."""

from __future__ import annotations

import pytest
import torch

from composer_replication.engines.group_objective import clipped_objective, group_advantages
from composer_replication.engines.verl_plugin import advantage


def test_advantages_are_rewards_less_their_groups_mean() -> None:
    reward_B = torch.tensor([1.0, 0.0, 1.0, 5.0])
    advantage_B = group_advantages(reward_B, ["a", "b", "a", "b"], torch.ones(4))
    assert advantage_B.tolist() == [0.0, -2.5, 0.0, 2.5]


def test_what_the_sandbox_lost_is_nobodys_zero() -> None:
    """It moves nothing and is not in the mean of its group."""
    reward_B = torch.tensor([1.0, 0.0, 0.0])
    advantage_B = group_advantages(reward_B, [7, 7, 7], torch.tensor([1, 1, 0]))
    assert advantage_B.tolist() == [0.5, -0.5, 0.0]


def test_verls_form_spreads_them_over_the_sampled_tokens() -> None:
    mask_BT = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    rewards_BT = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    found_BT, returns_BT = advantage(rewards_BT, mask_BT, index=["x", "x", "x"])
    assert found_BT.tolist() == [[0.5, 0.0, 0.5], [-0.5, -0.5, -0.0], [0.0, 0.0, 0.0]]
    assert returns_BT is found_BT


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_objective_is_that_of_trl(sign: float) -> None:
    """TRL 1.16, ``loss_type = "dr_grpo"``: min of two products, per token."""
    torch.manual_seed(0)
    logp, old = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    advantage_BT, weight = torch.full((2, 3), sign), torch.rand(2, 3)
    found = clipped_objective(logp, old, advantage_BT, weight, clip_low=0.2, clip_high=0.28)
    ratio = (logp - old).exp()
    wanted = -torch.min(ratio * advantage_BT, ratio.clamp(0.8, 1.28) * advantage_BT) * weight
    assert torch.equal(found, wanted)
    found.sum().backward()
    is_cut = (ratio > 1.28) if sign > 0 else (ratio < 0.8)
    assert logp.grad is not None
    assert torch.equal(logp.grad == 0, is_cut)
