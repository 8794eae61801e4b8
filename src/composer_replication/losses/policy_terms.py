"""Terms that enter the policy gradient beside the reward: KL, effort, importance weights; and what shows an odd batch.

Letters: B rollouts, G rollouts of one prompt, T completion tokens, P prompt tokens, K groups. What stands where a mask is 0 is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composer_replication.losses.argument_checks import require, require_same_shape, wide

_MOST_LOG_RATIO = 20.0  # exp of it is far above any clip, and finite in float32


def k1_per_rollout(
    sampled_logp_BT: torch.Tensor, reference_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """K_i = sum_t (sampled_logp - reference_logp) over unmasked tokens, nats per rollout, no gradient.

    The k1 estimate of KL(policy || reference): unbiased, can be negative for one rollout. 0 for a rollout
    without a token.

    Raises:
        InputError: CR0722, shapes that differ.
    """
    tensors = {"sampled_logp_BT": sampled_logp_BT, "reference_logp_BT": reference_logp_BT, "mask_BT": mask_BT}
    require_same_shape(tensors, where="k1_per_rollout")
    difference_BT = (wide(sampled_logp_BT) - wide(reference_logp_BT)).detach()
    return difference_BT.where(mask_BT.bool(), 0.0).sum(-1)


def fold_kl_into_advantages(
    advantage_B: torch.Tensor,
    kl_B: torch.Tensor,
    *,
    beta: float,
    group_size: int,
    valid_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """A_i - beta (K_i - mean_j K_j), the mean over the rollout's group.

    k1 as a loss has zero expected gradient; folded into the reward it has that of the reverse KL. Exact only
    where advantages are not divided by the group's standard deviation: the caller refuses that combination.

    Args:
        advantage_B: R_i - mean_j R_j, groups one after another.
        kl_B: ``k1_per_rollout``.
        beta: nats to reward, at least 0.
        group_size: G; B is a multiple of it.
        valid_B: 0 for rollouts that are left out of the loss (infrastructure failures): their K does not enter
            the group's mean and their advantage stays as it is.

    Reference: A Comedy of Estimators (2025, arXiv 2512.21852).

    Raises:
        UsageError: CR0722, B is no multiple of the group size.
        InputError: CR0722, shapes that differ.
    """
    where = "fold_kl_into_advantages"
    require_same_shape({"advantage_B": advantage_B, "kl_B": kl_B}, where=where)
    num_rollouts = advantage_B.numel()
    require(
        group_size >= 1 and advantage_B.dim() == 1 and num_rollouts % group_size == 0,
        f"{num_rollouts} rollouts are not whole groups of {group_size}.",
        where=where,
    )
    valid = torch.ones_like(kl_B, dtype=torch.bool) if valid_B is None else valid_B.bool()
    require_same_shape({"advantage_B": advantage_B, "valid_B": valid}, where=where)
    if beta == 0 or num_rollouts == 0:
        return advantage_B
    valid_PG = valid.view(-1, group_size)
    kl_PG = wide(kl_B).detach().view(-1, group_size).where(valid_PG, 0.0)
    mean_P1 = kl_PG.sum(1, keepdim=True) / valid_PG.sum(1, keepdim=True).clamp(min=1)
    centred_B = (kl_PG - mean_P1).where(valid_PG, 0.0).view(-1)
    return advantage_B - beta * centred_B.to(advantage_B.dtype)


def effort_cost(effort: torch.Tensor, *, scale: float, curvature: float) -> torch.Tensor:
    """Cost of effort: ((1 + k x)^(1 - q) - 1) / (k (1 - q)), k = scale, q = curvature; same shape as x.

    Linear (x) at k = 0 or q = 0, ln(1 + k x) / k at q = 1, bounded by 1 / (k (q - 1)) for q > 1; concave for
    q > 0: the first unit costs 1, later ones less, so that hard tasks may be long. Computed as
    x * (log1p(k x) / (k x)) * (expm1(u) / u), u = (1 - q) log1p(k x), which is exact to rounding at every limit.

    Args:
        effort: x at least 0: a weighted sum of thinking, tool-call, tool-output and final tokens, calls, turns.
        scale: k, at least 0, in 1 / (unit of x).
        curvature: q, at least 0. Below 0 the cost would be convex and punish what is hard.

    Departs from the paper: k, q and the weights are not published; the caller chooses them.
    Reference: Composer 2 (2026, arXiv 2603.24477), as two summaries give it.
    """
    effort = wide(effort)
    grown = torch.log1p(scale * effort)
    power = (1 - curvature) * grown
    return effort * _ratio(grown, scale * effort) * _ratio(torch.expm1(power), power)


@dataclass(frozen=True, slots=True)
class ImportanceMetrics:
    """What to log of importance weights: 0-dimensional tensors without gradient, over the tokens that were weighed."""

    masked_share: torch.Tensor
    """Share of tokens whose ratio is above the clip; 0 of none."""
    effective_sample_share: torch.Tensor
    """(sum w)^2 / (n sum w^2) after truncation: 1 where all weights are equal, and of none."""


def truncated_importance_weights(
    train_logp_BT: torch.Tensor,
    sampler_logp_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip: float = 2.0,
) -> tuple[torch.Tensor, ImportanceMetrics]:
    """Token weights min(r, clip) with r = exp(train_logp - sampler_logp), no gradient; and what to log.

    The engine that samples and the model that trains disagree about the same tokens, and the model moves between
    sampling and training. Truncation from above bounds the variance; the bias is towards tokens that the sampler liked
    better. Token by token, since the ratio of a long rollout is near 0 or beyond any bound.

    Args:
        train_logp_BT: the training model's, before the update, nats; any shape.
        sampler_logp_BT: the sampling engine's; NaN where it gave no number.
        mask_BT: 1 for tokens that count; elsewhere, and where the sampler gave no number, the weight is 1.
        clip: above 0; 2 by default.

    Reference: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025, Fengyuan et al.);
    Reinforcement Learning via Self-Distillation (2026, arXiv 2601.20802) for hinted turns.

    Raises:
        InputError: CR0722, shapes that differ.
    """
    tensors = {"train_logp_BT": train_logp_BT, "sampler_logp_BT": sampler_logp_BT, "mask_BT": mask_BT}
    require_same_shape(tensors, where="truncated_importance_weights")
    known_BT = mask_BT.bool() & ~torch.isnan(sampler_logp_BT)
    log_ratio_BT = (wide(train_logp_BT) - wide(sampler_logp_BT)).detach().where(known_BT, 0.0)
    ratio_BT = log_ratio_BT.clamp(max=_MOST_LOG_RATIO).exp()
    is_above_BT = (ratio_BT > clip) & known_BT
    weights_BT = ratio_BT.masked_fill(is_above_BT, clip)
    metrics = ImportanceMetrics(
        masked_share=is_above_BT.sum() / known_BT.sum().clamp(min=1),
        effective_sample_share=effective_share(weights_BT[known_BT]),
    )
    return weights_BT, metrics


def sampler_distance(
    train_logp_BT: torch.Tensor, sampler_logp_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """|train_logp - sampler_logp| of each token, nats, 0 where unknown; and where it is known. No gradient."""
    known_BT = mask_BT.bool() & ~torch.isnan(sampler_logp_BT)
    return (train_logp_BT - sampler_logp_BT).abs().detach().where(known_BT, 0.0), known_BT


def effective_share(weights_N: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (N sum w^2), in float64: 1 where all are equal, 1 / N where one is all.

    1 for no weight; 0 where every weight is 0. It never waits for the device. Reference: Kish, Survey Sampling (1965).
    """
    weights_N = weights_N.detach().double()
    if weights_N.numel() == 0:
        return weights_N.new_ones(())
    return weights_N.sum() ** 2 / (weights_N.numel() * (weights_N**2).sum()).clamp(min=1e-300)


def equal_in_groups(values_B: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group its highest value, and whether all are equal; NaN, for rows that nobody scored, does not count."""
    highest_K = values_B.nan_to_num(nan=-torch.inf).view(-1, group_size).amax(-1)
    lowest_K = values_B.nan_to_num(nan=torch.inf).view(-1, group_size).amin(-1)
    return highest_K, (highest_K < lowest_K) | torch.isclose(highest_K, lowest_K)


def rows_over_padding(
    prompt_mask_BP: torch.Tensor, mask_BT: torch.Tensor, is_pad_BT: torch.Tensor
) -> torch.Tensor:
    """Rows (B,) whose mask has a hole, whose prompt mask has one, or which carry loss on trailing padding.

    Completions are padded on the right and prompts on the left, so a completion's mask may only fall and a
    prompt's only rise. One padding token at a row's end may have been sampled (it may be the end token), two cannot.
    """
    rises_B = (mask_BT[:, 1:] & ~mask_BT[:, :-1]).any(-1)
    falls_B = (prompt_mask_BP[:, :-1] & ~prompt_mask_BP[:, 1:]).any(-1)
    is_last_BT = mask_BT & ~torch.nn.functional.pad(mask_BT[:, 1:], (0, 1))
    ends_in_pads_B = (is_last_BT[:, 1:] & is_pad_BT[:, 1:] & is_pad_BT[:, :-1]).any(-1)
    return rises_B | falls_B | ends_in_pads_B


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Quotient of two quantities that vanish together with slope 1; subnormal numbers count as vanished."""
    is_zero = denominator.abs() < torch.finfo(denominator.dtype).tiny
    return (numerator / denominator.masked_fill(is_zero, 1.0)).masked_fill(is_zero, 1.0)
