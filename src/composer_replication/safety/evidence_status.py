"""What the evidence detector says after one evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

HALTED = "halted"
CLEAN = "clean"
INSUFFICIENT_DATA = "INSUFFICIENT_DATA"


def verdict_of(*, fire: bool, insufficient_data: bool) -> str:
    """``halted``, ``INSUFFICIENT_DATA`` or ``clean``, in this order: too little data is never a pass."""
    if fire:
        return HALTED
    return INSUFFICIENT_DATA if insufficient_data else CLEAN


@dataclass(frozen=True, slots=True)
class EvidenceStatus:
    """The state of the evidence after one evaluation, or after one that was missed.

    Attributes:
        fire: the run must halt.
        warn: the evidence is at least 10 now; nothing stops. Error of ever warning on a
            clean run: at most 10% + ``alpha_1``.
        reason: empty, or why it fired; starts with ``latched:`` after the event that fired.
        cause: empty, ``evidence`` (inside the guarantee), ``infrastructure`` or ``missed``
            (both outside it): the kind of the first firing.
        step: number of evaluations folded.
        log_evidence: log of the mixed evidence; the alarm is at ``-log(alpha - alpha_1)``.
        gap_log_evidence: stream "visible minus hidden is larger than tolerated".
        collapse_log_evidence: stream "the true score fell from its best".
        canary_log_evidence: stream "impossible tasks are passed".
        p_value: ``min(1, exp(-largest log_evidence so far) + alpha_1)``: valid at any
            stopping time, never rises, and is at most ``alpha`` once the evidence fired.
        lower_bound: lower confidence bound on the best true score so far.
        tolerated_gap: g0 in force at this evaluation.
        num_samples: (visible, hidden) pairs folded so far.
        num_canaries: canary attempts folded so far; 0 means that this stream is inert.
        num_neutral: tasks neutralised in the last evaluations (``neutral_window`` of them).
        missed_in_a_row: evaluations missed since the last one that was folded.
        insufficient_data: too little was seen for a verdict of "clean"; see ``EvidenceGuard``.
        cusum: the sum of Page's CUSUM of the gap, in samples.
        cusum_warning: it is above its limit; faster, and without any guarantee.
    """

    fire: bool
    warn: bool
    reason: str
    cause: str
    step: int
    log_evidence: float
    gap_log_evidence: float
    collapse_log_evidence: float
    canary_log_evidence: float
    p_value: float
    lower_bound: float
    tolerated_gap: float
    num_samples: int
    num_canaries: int
    num_neutral: int
    missed_in_a_row: int
    insufficient_data: bool
    cusum: float
    cusum_warning: bool

    @property
    def halt(self) -> bool:
        """The same as ``fire``."""
        return self.fire

    @property
    def verdict(self) -> str:
        """``halted``, ``clean`` or ``INSUFFICIENT_DATA``."""
        return verdict_of(fire=self.fire, insufficient_data=self.insufficient_data)

    @property
    def streams(self) -> dict[str, float]:
        """Log evidence by stream."""
        return {
            "gap": self.gap_log_evidence,
            "collapse": self.collapse_log_evidence,
            "canary": self.canary_log_evidence,
        }

    @property
    def figures(self) -> dict[str, float]:
        """What a log keeps, by short name; a log of zero (nothing folded yet) is left out."""
        named = {
            "log": self.log_evidence,
            **self.streams,
            "p_value": self.p_value,
            "warn": self.warn,
            "lower_bound": self.lower_bound,
            "num_samples": self.num_samples,
            "num_canaries": self.num_canaries,
            "num_neutral": self.num_neutral,
            "missed_in_a_row": self.missed_in_a_row,
            "insufficient_data": self.insufficient_data,
            "cusum": self.cusum,
            "cusum_warning": self.cusum_warning,
        }
        return {name: float(value) for name, value in named.items() if math.isfinite(value)}
