"""Token-level truncated importance sampling between the sampler and the model that is trained.

Shapes: B rollouts, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composer_replication.losses.policy_terms import effective_sample_share, truncated_importance_weights


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
    """
    known_BT = _known(sampled_logp_BT, mask_BT)
    if not bool(known_BT.any()):
        return torch.ones_like(policy_logp_BT)
    weights_BT, _ = truncated_importance_weights(policy_logp_BT, sampled_logp_BT, known_BT, clip=clip)
    return weights_BT.where(known_BT, 1.0)


def importance_figures(
    policy_logp_BT: torch.Tensor, sampled_logp_BT: torch.Tensor, mask_BT: torch.Tensor, clip: float
) -> ImportanceFigures:
    """Measure the correction over the loss-carrying tokens whose sampler's probability is known."""
    known_BT = _known(sampled_logp_BT, mask_BT)
    num_tokens = int(known_BT.sum())
    if not num_tokens:
        return ImportanceFigures(0.0, 1.0, 1.0, 0)
    _, metrics = truncated_importance_weights(policy_logp_BT, sampled_logp_BT, known_BT, clip=clip)
    log_ratio_BT = (policy_logp_BT.detach() - sampled_logp_BT).double().where(known_BT, 0.0)
    has_tokens_B = known_BT.any(-1)
    per_row_B = log_ratio_BT.sum(-1)
    shift = per_row_B[has_tokens_B].max()  # the share does not change, and exp cannot overflow
    return ImportanceFigures(
        float(metrics.masked_share),
        float(metrics.effective_sample_share),
        float(effective_sample_share((per_row_B - shift).exp(), has_tokens_B)),
        num_tokens,
    )


def _known(sampled_logp_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return mask_BT.bool() & ~torch.isnan(sampled_logp_BT)
