"""DPO, IPO and SimPO on pairs of answers to one prompt.

Letters: P pairs, B rows, T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from composer_replication.errors import UsageError
from composer_replication.losses.argument_checks import (
    require_same_shape,
    require_something,
    require_weights,
    wide,
)

PreferenceKind = Literal["dpo", "ipo", "simpo"]


@dataclass(frozen=True, slots=True)
class PreferenceMetrics:
    """What to log of one preference batch: 0-dimensional tensors without gradient, means by weight."""

    accuracy: torch.Tensor
    """Share of pairs whose chosen answer has the higher implicit reward (ties count as wrong)."""
    chosen_reward: torch.Tensor
    """beta (log pi - log pi_ref) of the chosen answer; without a reference beta log pi."""
    rejected_reward: torch.Tensor
    reward_margin: torch.Tensor
    """chosen_reward minus rejected_reward."""
    total_weight: torch.Tensor
    num_pairs: torch.Tensor
    """Pairs with a weight above 0."""


def preference_loss(
    policy_chosen_logp_P: torch.Tensor,
    policy_rejected_logp_P: torch.Tensor,
    reference_chosen_logp_P: torch.Tensor | None,
    reference_rejected_logp_P: torch.Tensor | None,
    *,
    kind: PreferenceKind,
    beta: float,
    margin: float = 0.0,
    weight_P: torch.Tensor | None = None,
) -> tuple[torch.Tensor, PreferenceMetrics]:
    """Preference loss, weighted mean over pairs, and what to log.

    With h = (c - c_ref) - (r - r_ref):
    dpo     -log sigmoid(beta h - margin)
    ipo     (h - 1 / (2 beta))^2
    simpo   as dpo with h = c - r: no reference is read
    L = sum_i w_i l_i / sum_i w_i

    Which log-probabilities: the caller says, by what it passes (``sequence_logp`` makes both).
    dpo     summed in the paper; length-normalised favours neither long nor short answers and wants a beta
            larger by about the length
    ipo     length-normalised, as in the paper's experiments; summed, the square grows with length
    simpo   length-normalised by definition

    Args:
        policy_chosen_logp_P: carries gradient.
        policy_rejected_logp_P: carries gradient.
        reference_chosen_logp_P: under the reference, detached here; None for simpo.
        reference_rejected_logp_P: the same for the rejected answer.
        kind: dpo, ipo or simpo.
        beta: above 0. Usual: dpo 0.1 (summed), ipo 0.1, simpo 2.0 to 2.5.
        margin: target reward margin, at least 0; simpo's gamma (usually 0.5 to 1.6), for dpo that of ODPO.
            ipo has its own margin, 1 / (2 beta), and takes none.
        weight_P: at least 0; None weighs all alike. A pair of weight 0 is not read.

    Departs from the papers: weights; the margin in DPO.
    Reference: DPO (2023, arXiv 2305.18290), equation 7; IPO (2023, arXiv 2310.12036), equation 17;
    SimPO (2024, arXiv 2405.14734), equation 6; ODPO (2024, arXiv 2402.10571), equation 8.

    Raises:
        UsageError: CR0722, no reference where the kind needs one.
        InputError: CR0722, shapes that differ.
        EmptyMaskError: CR0722, no pair with a weight above 0.
    """
    where = "preference_loss"
    shapes = {"policy_chosen": policy_chosen_logp_P, "policy_rejected": policy_rejected_logp_P}
    if kind != "simpo":
        if reference_chosen_logp_P is None or reference_rejected_logp_P is None:
            raise UsageError(
                "CR0722",
                f"{kind} compares with a reference, and none was given.",
                where=where,
                fix="pass the reference's log-probabilities, or take simpo.",
            )
        shapes |= {
            "reference_chosen": reference_chosen_logp_P,
            "reference_rejected": reference_rejected_logp_P,
        }
    if weight_P is None:
        weight_P = torch.ones_like(policy_chosen_logp_P, requires_grad=False)
    require_same_shape({**shapes, "weight_P": weight_P}, where=where)
    require_weights(weight_P, "weight_P", where=where)
    kept_P = weight_P > 0
    require_something(kept_P, "pair with a weight above 0", where=where)
    dtype = torch.promote_types(policy_chosen_logp_P.dtype, torch.float32)
    weights_P = weight_P[kept_P].detach().to(dtype)
    chosen_P, rejected_P = (each[kept_P].to(dtype) for each in (policy_chosen_logp_P, policy_rejected_logp_P))
    if reference_chosen_logp_P is not None and reference_rejected_logp_P is not None and kind != "simpo":
        chosen_P = chosen_P - reference_chosen_logp_P.detach()[kept_P]
        rejected_P = rejected_P - reference_rejected_logp_P.detach()[kept_P]
    gap_P = chosen_P - rejected_P
    if kind == "ipo":
        losses_P = (gap_P - 1 / (2 * beta)).square()
    else:
        losses_P = -functional.logsigmoid(beta * gap_P - margin)
    loss = (weights_P * losses_P).sum() / weights_P.sum()
    return loss, _metrics(chosen_P.detach(), rejected_P.detach(), weights_P, beta)


def _metrics(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, weights_P: torch.Tensor, beta: float
) -> PreferenceMetrics:
    def mean(values_P: torch.Tensor) -> torch.Tensor:
        return (weights_P * values_P).sum() / weights_P.sum()

    return PreferenceMetrics(
        accuracy=mean((chosen_P > rejected_P).to(weights_P.dtype)),
        chosen_reward=beta * mean(chosen_P),
        rejected_reward=beta * mean(rejected_P),
        reward_margin=beta * mean(chosen_P - rejected_P),
        total_weight=weights_P.sum(),
        num_pairs=torch.tensor(weights_P.numel(), device=weights_P.device),
    )


def sequence_logp(logp_BT: torch.Tensor, mask_BT: torch.Tensor, *, length_normalised: bool) -> torch.Tensor:
    """Log-probability of each answer: the sum over its unmasked tokens, or their mean, shape (B,).

    What stands under a mask of 0 is not read, not even when it is not a number.

    Raises:
        EmptyMaskError: CR0722, an answer without a token (its mean does not exist, and as a sum it would be
            the likeliest of all).
        InputError: CR0722, shapes that differ.
    """
    require_same_shape({"logp_BT": logp_BT, "mask_BT": mask_BT}, where="sequence_logp")
    kept_BT = mask_BT.bool()
    has_token_B = kept_BT.any(-1)
    if not bool(has_token_B.all()):
        row = int((~has_token_B).nonzero()[0])
        require_something(kept_BT[row], f"token of answer {row}", where="sequence_logp")
    wide_BT = wide(logp_BT)
    sums_B = wide_BT.where(kept_BT, 0.0).sum(-1)
    return sums_B / kept_BT.sum(-1) if length_normalised else sums_B
