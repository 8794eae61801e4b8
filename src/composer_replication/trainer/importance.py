"""Token-level truncated importance sampling between the sampler and the model that is trained.

Shapes: B rollouts, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ImportanceFigures:
    """What the correction did to one batch.

    Attributes:
        truncated_share: share of tokens whose ratio was above the clip.
        effective_sample_size: of the tokens, after truncation, as a share of their number: (sum w)^2 / (n sum w^2).
        sequence_effective_sample_size: the same over rows with the plain product of a row's ratios: what a
            correction of whole sequences would leave.
        num_tokens: tokens that carry loss.
    """

    truncated_share: float
    effective_sample_size: float
    sequence_effective_sample_size: float
    num_tokens: int


def truncated_ratio(
    policy_logp_BT: torch.Tensor, sampled_logp_BT: torch.Tensor, mask_BT: torch.Tensor, clip: float
) -> torch.Tensor:
    """``min(exp(policy_logp - sampled_logp), clip)`` for each token, (B, T), without gradient.

    1 outside the mask, and where the sampler gave no number. Truncation from above bounds the variance; the
    bias is towards tokens that the sampler liked better. Cutting single tokens keeps long rollouts:
    the product over a long row is near 0 or far above any bound.
    Reference: Ionides, Truncated Importance Sampling (2008); TRL's ``token_truncate``.
    """
    log_ratio_BT = torch.nan_to_num((policy_logp_BT.detach() - sampled_logp_BT) * mask_BT, nan=0.0)
    return log_ratio_BT.exp().clamp(max=clip)


def effective_share(weights_N: torch.Tensor) -> torch.Tensor:
    """``(sum w)^2 / (N sum w^2)``, a scalar from 1/N (one weight holds all) to 1 (all equal); 1 for no weight.

    Reference: Kish (1965).
    """
    weights_N = weights_N.double()
    if weights_N.numel() == 0:
        return weights_N.new_ones(())
    return weights_N.sum() ** 2 / (weights_N.numel() * (weights_N**2).sum()).clamp(min=1e-300)


def importance_figures(
    policy_logp_BT: torch.Tensor, sampled_logp_BT: torch.Tensor, mask_BT: torch.Tensor, clip: float
) -> ImportanceFigures:
    """Measure the correction over the loss-carrying tokens of one batch."""
    is_in_BT = mask_BT.bool()
    log_ratio_BT = torch.nan_to_num((policy_logp_BT.detach() - sampled_logp_BT).float(), nan=0.0) * is_in_BT
    ratio_N = log_ratio_BT[is_in_BT].exp()
    per_row_B = log_ratio_BT.sum(-1)[is_in_BT.any(-1)]
    shift = per_row_B.max() if per_row_B.numel() else 0.0  # the share does not change, and exp cannot overflow
    figures = torch.stack(
        [
            (ratio_N > clip).double().sum() / max(ratio_N.numel(), 1),
            effective_share(ratio_N.clamp(max=clip)),
            effective_share((per_row_B - shift).exp()),
        ]
    ).tolist()
    return ImportanceFigures(*figures, num_tokens=ratio_N.numel())
