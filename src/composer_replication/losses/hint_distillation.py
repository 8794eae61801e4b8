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

_MOST_LOG_RATIO = 20.0  # exp of it is far above any clip, and finite in float32


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

    A turn that the gate closes gives no gradient at all, yet its tokens stay in the denominator: an
    uninformative turn does not make the others louder. Weights do not enter the denominator either.

    Args:
        divergence_BT: nats; carries gradient.
        mask_BT: 1 for sampled tokens of the hinted turn that count.
        weight_BT: token weights at least 0 (``importance_weights``, ``certainty_weights``); no gradient; None is 1.
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
    _, open_B = information_gate(divergence_BT, kept_BT, gate_threshold=gate_threshold)
    weights_BT = _checked_weights(divergence_BT, kept_BT, weight_BT, turn_weight_B, where=where)
    open_BT = kept_BT & open_B[:, None]
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


def importance_weights(
    logp_BT: torch.Tensor, sampled_logp_BT: torch.Tensor, mask_BT: torch.Tensor, *, clip: float = 2.0
) -> torch.Tensor:
    """min(exp(logp - sampled_logp), clip), without gradient; 1 where the mask is 0.

    The student has moved since it sampled; the weight corrects for that and is bounded above.

    Args:
        logp_BT: the student now, nats.
        sampled_logp_BT: the student when it sampled.
        mask_BT: 1 for tokens that count.
        clip: above 0; 2 as in SDPO.

    Reference: Reinforcement Learning via Self-Distillation (2026, arXiv 2601.20802).

    Raises:
        InputError: CR0722, shapes that differ.
    """
    where = "importance_weights"
    tensors = {"logp_BT": logp_BT, "sampled_logp_BT": sampled_logp_BT, "mask_BT": mask_BT}
    require_same_shape(tensors, where=where)
    kept_BT = mask_BT.bool()
    log_ratio_BT = (wide(logp_BT) - wide(sampled_logp_BT)).detach().where(kept_BT, 0.0)
    weights_BT = log_ratio_BT.clamp(max=_MOST_LOG_RATIO).exp().clamp(max=clip)
    return weights_BT.where(kept_BT, 1.0)


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


def information_gate(
    divergence_BT: torch.Tensor, mask_BT: torch.Tensor, *, gate_threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean divergence of each turn over its unmasked tokens, and whether the turn is let through.

    A hint that does not change what the teacher expects carries no information; training on its rounding
    errors would be noise. At threshold 0 every turn with a token passes, one whose divergence is not a number
    too: the loss must show it, not hide it.

    Returns:
        Divergence (B,), not a number where the turn has no token; open (B,) of booleans.

    Raises:
        InputError: CR0722, shapes that differ.
    """
    where = "information_gate"
    require_same_shape({"divergence_BT": divergence_BT, "mask_BT": mask_BT}, where=where)
    kept_BT = mask_BT.bool()
    count_B = kept_BT.sum(-1)
    mean_B = wide(divergence_BT).detach().where(kept_BT, 0.0).sum(-1) / count_B
    # Rounding may leave a divergence of 0 slightly below it: threshold 0 means that there is no gate.
    is_open_B = (
        ~(mean_B < gate_threshold) if gate_threshold > 0 else torch.ones_like(count_B, dtype=torch.bool)
    )
    return mean_B, is_open_B & (count_B > 0)


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
