"""How far the student is from the teacher, per token.

Letters: B rollouts, T completion tokens, N positions in a flat list, K tokens of a support,
S classes of a whole distribution (the support and, with a tail, one class more).
p is the student, q the teacher; the teacher never carries gradient. All results are nats,
float32 (float64 for float64 inputs).

The support is the student's top k, read once without gradient; both sides are scored on it.
The one tail class holds what is left of each, so that both are whole distributions and mass that
moves out of the support is seen.
"""

from __future__ import annotations

import math

import torch

from composer_replication.losses.argument_checks import require_same_shape, wide


def support_divergence(
    student_logp_NK: torch.Tensor,
    teacher_logp_NK: torch.Tensor,
    *,
    jsd_alpha: float,
) -> torch.Tensor:
    """Divergence of student and teacher over the student's top k and one tail class, per position.

    jsd_alpha = 0       KL(q || p), forward: p covers what q does
    jsd_alpha = 1       KL(p || q), reverse: p keeps to what q finds likely
    between, a          (1 - a) KL(p || m) + a KL(q || m) with m = (1 - a) p + a q

    The middle formula tends to 0 at both ends, so the ends are switched: the scale jumps there
    (JSD / (a (1 - a)) tends to KL(q || p) at 0 and to KL(p || q) at 1).

    Args:
        student_logp_NK: log-probabilities of the support under the student, over the whole vocabulary
            (they sum to at most 1); carries the gradient.
        teacher_logp_NK: the same tokens under the teacher.
        jsd_alpha: interpolation, 0 to 1. SDPO uses 0.5 with k = 100, and 1 with k = 20 under rich feedback.

    Returns:
        Divergence (N,), at least 0 but for rounding. Infinite where one side gives probability 0 to a
        class that the other needs (never for 0 < jsd_alpha < 1).

    Departs from the reference: the tail is kept, where TRL drops it by default.
    Reference: Reinforcement Learning via Self-Distillation (2026, arXiv 2601.20802).

    Raises:
        InputError: CR0722, shapes that differ.
    """
    require_same_shape({"student": student_logp_NK, "teacher": teacher_logp_NK}, where="support_divergence")
    return divergence(with_tail_class(student_logp_NK), with_tail_class(teacher_logp_NK), jsd_alpha=jsd_alpha)


def divergence(
    student_logp_NS: torch.Tensor, teacher_logp_NS: torch.Tensor, *, jsd_alpha: float
) -> torch.Tensor:
    """Divergence of two whole distributions (rows that sum to 1): formulas of ``support_divergence``.

    Raises:
        InputError: CR0722, shapes that differ.
    """
    require_same_shape({"student": student_logp_NS, "teacher": teacher_logp_NS}, where="divergence")
    student, teacher = wide(student_logp_NS), wide(teacher_logp_NS).detach()
    if jsd_alpha == 0:
        return _kl(teacher, student)
    if jsd_alpha == 1:
        return _kl(student, teacher)
    mixture = _log_mixture(student, teacher, jsd_alpha)
    return (1 - jsd_alpha) * _kl(student, mixture) + jsd_alpha * _kl(teacher, mixture)


def with_tail_class(logp_NK: torch.Tensor) -> torch.Tensor:
    """Append the class of all other tokens, log(1 - sum_k exp(logp_k)): shape (N, K + 1).

    The tail is at least one unit of rounding (1.2e-7 in float32), so that its logarithm is finite when
    the support holds everything, or a little more than everything by rounding; there it has no gradient.
    """
    logp = wide(logp_NK)
    log_mass = logp.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(logp.dtype).eps)
    return torch.cat([logp, torch.log(-torch.expm1(log_mass))], dim=-1)


def _kl(from_logp: torch.Tensor, to_logp: torch.Tensor) -> torch.Tensor:
    """KL of one log-distribution from another over the last dimension; 0 log 0 is 0, with no gradient."""
    has_mass = from_logp > -torch.inf
    # The inner where keeps the infinite difference of two empty classes out of the backward pass.
    source = from_logp.where(has_mass, 0.0)
    terms = source.exp() * (source - to_logp.where(has_mass, 0.0))
    return terms.where(has_mass, 0.0).sum(-1)


def _log_mixture(student: torch.Tensor, teacher: torch.Tensor, jsd_alpha: float) -> torch.Tensor:
    """log((1 - a) p + a q); a class empty on both sides stays empty and passes no gradient."""
    is_empty = (student == -torch.inf) & (teacher == -torch.inf)
    mixed = torch.logaddexp(
        student.where(~is_empty, 0.0) + math.log1p(-jsd_alpha),
        teacher.where(~is_empty, 0.0) + math.log(jsd_alpha),
    )
    return mixed.masked_fill(is_empty, -torch.inf)
