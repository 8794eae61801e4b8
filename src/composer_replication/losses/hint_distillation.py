"""Which tokens of a hinted turn count, and how much.

The teacher is a policy that sees a hint in one turn's context; it scores the tokens that the student sampled
there. This module takes the divergence per token (``divergence.py``) and gives the loss: masked, weighted,
gated by turn, averaged over unmasked tokens.

Letters: B turns (one row each: the same completion under both contexts), T completion tokens.
What stands where the mask is 0 (padding, tool output, hint text) is never read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from composer_replication.losses.argument_checks import (
    require_same_shape,
    require_something,
    require_weights,
    wide,
)


@dataclass(frozen=True, slots=True)
class HintDistillationMetrics:
    """What to log of one hinted batch: 0-dimensional tensors without gradient."""

    divergence: torch.Tensor
    """Mean over unmasked tokens, before weights and gate, nats."""
    num_tokens: torch.Tensor
    num_turns: torch.Tensor
    """Turns with an unmasked token."""
    num_open_turns: torch.Tensor
    """Turns that the gate let through."""


def hint_distillation_loss(
    divergence_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    weight_BT: torch.Tensor | None = None,
    turn_weight_B: torch.Tensor | None = None,
    gate_threshold: float = 0.0,
    num_tokens: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, HintDistillationMetrics]:
    """Weighted divergence per unmasked token, and what to log.

    L = sum_bt m_bt g_b v_b w_bt D_bt / sum_bt m_bt,
    g_b = 1 where the mean of D over the turn's unmasked tokens is at least ``gate_threshold``, else 0.

    A hint that does not change what the teacher expects carries no information; training on its rounding errors would be
    noise. A turn whose divergence is not a number passes: the loss must show it, not hide it.

    A turn that the gate closes gives no gradient at all, yet its tokens stay in the denominator: an
    uninformative turn does not make the others louder. Weights do not enter the denominator either.

    Args:
        divergence_BT: nats; carries gradient.
        mask_BT: 1 for sampled tokens of the hinted turn that count.
        weight_BT: token weights at least 0 (``policy_terms.truncated_importance_weights``, ``certainty_weights``); no gradient; None is 1.
        turn_weight_B: weights of turns, at least 0; None is 1.
        gate_threshold: nats per token, at least 0; 0 (default) lets every turn through.
        num_tokens: denominator instead of this batch's own count, for gradient accumulation: the number of
            unmasked tokens of the whole step makes several small batches equal one large one.

    Departs from the reference: SDPO averages tokens within a rollout first; here long and short turns weigh
    by their tokens, as the policy-gradient channel does. The gate is this project's own.
    Reference: Reinforcement Learning via Self-Distillation (2026, arXiv 2601.20802).

    Raises:
        EmptyMaskError: CR0722, no unmasked token.
        InputError: CR0722, shapes that do not fit.
    """
    where = "hint_distillation_loss"
    kept_BT = _checked_mask(divergence_BT, mask_BT, where=where)
    divergence_BT = wide(divergence_BT).where(kept_BT, 0.0)
    open_BT = kept_BT
    if gate_threshold > 0:  # rounding may leave a divergence of 0 slightly below it
        mean_B1 = divergence_BT.detach().sum(-1, keepdim=True) / kept_BT.sum(-1, keepdim=True)
        open_BT = kept_BT & ~(mean_B1 < gate_threshold)
    weights_BT = _checked_weights(divergence_BT, kept_BT, weight_BT, turn_weight_B, where=where)
    count = kept_BT.sum()
    loss = (weights_BT * divergence_BT).where(open_BT, 0.0).sum() / (
        count if num_tokens is None else num_tokens
    )
    with torch.no_grad():
        metrics = HintDistillationMetrics(
            divergence=divergence_BT.detach().sum() / count,
            num_tokens=count,
            num_turns=kept_BT.any(-1).sum(),
            num_open_turns=open_BT.any(-1).sum(),
        )
    return loss, metrics


def certainty_weights(teacher_entropy_BT: torch.Tensor, *, strength: float) -> torch.Tensor:
    """exp(-strength H_teacher), without gradient: an unsure teacher teaches less.

    Args:
        teacher_entropy_BT: entropy over the vocabulary, nats; any shape.
        strength: b, at least 0; 0 weighs all tokens alike.

    Departs from SRPO: weights are not normalised to mean 1, so that one batch's weights do not depend on
    which other rows it holds.
    Reference: SRPO (2026, arXiv 2604.02288).
    """
    return torch.exp(-strength * wide(teacher_entropy_BT).detach())


def decayed_weight(weight: float, *, step: int, decay_steps: int) -> float:
    """Channel weight after a cosine decay to 0 over ``decay_steps``; 0 of them means no decay.

    w(s) = weight (1 + cos(pi min(s / S, 1))) / 2. Hint distillation saturates late; its weight should fall while the
    policy gradient's stays.
    """
    if decay_steps == 0:
        return weight
    return weight * (1 + math.cos(math.pi * min(step / decay_steps, 1.0))) / 2


def _checked_mask(divergence_BT: torch.Tensor, mask_BT: torch.Tensor, *, where: str) -> torch.Tensor:
    require_same_shape({"divergence_BT": divergence_BT, "mask_BT": mask_BT}, where=where)
    kept_BT = mask_BT.bool()
    require_something(kept_BT, "unmasked token", where=where)
    return kept_BT


def _checked_weights(
    divergence_BT: torch.Tensor,
    kept_BT: torch.Tensor,
    weight_BT: torch.Tensor | None,
    turn_weight_B: torch.Tensor | None,
    *,
    where: str,
) -> torch.Tensor:
    weights_BT = torch.ones_like(divergence_BT, requires_grad=False)
    if weight_BT is not None:
        require_same_shape({"divergence_BT": divergence_BT, "weight_BT": weight_BT}, where=where)
        weights_BT = weight_BT.detach().to(weights_BT.dtype).where(kept_BT, 1.0)
        require_weights(weights_BT, "weight_BT", where=where)
    if turn_weight_B is not None:
        require_same_shape({"turns": divergence_BT[:, 0], "turn_weight_B": turn_weight_B}, where=where)
        require_weights(turn_weight_B, "turn_weight_B", where=where)
        weights_BT = weights_BT * turn_weight_B.detach().to(weights_BT.dtype)[:, None]
    return weights_BT
