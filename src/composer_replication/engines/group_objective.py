"""Advantages and objective of a group's rollouts, without a trainer.

Letters: B rollouts, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch


def group_advantages(
    reward_B: torch.Tensor, groups_B: Sequence[Hashable], valid_B: torch.Tensor
) -> torch.Tensor:
    """A_i = R_i - mean of R over the valid rollouts of its group; 0 for a rollout that is not valid.

    Not divided by the group's standard deviation, which would weigh easy and hard tasks more than others. An attempt
    that the sandbox lost is not valid: it is nobody's zero.

    Reference: Understanding R1-Zero-Like Training (2025, arXiv 2503.20783).
    """
    places: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups_B):
        if bool(valid_B[row]):
            places.setdefault(group, []).append(row)
    advantage_B = torch.zeros_like(reward_B)
    for rows in places.values():
        advantage_B[rows] = reward_B[rows] - reward_B[rows].mean()
    return advantage_B


def clipped_objective(
    logp_BT: torch.Tensor,
    old_logp_BT: torch.Tensor,
    advantage_BT: torch.Tensor,
    weight_BT: torch.Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) for each token, r = exp(logp - old_logp); to be averaged.

    ``weight_BT`` are importance weights between sampler and trainer (``truncated_importance_weights``).

    Reference: Proximal Policy Optimization Algorithms (2017, arXiv 1707.06347).
    """
    ratio_BT = torch.exp(logp_BT - old_logp_BT)
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    return loss_BT if weight_BT is None else loss_BT * weight_BT
