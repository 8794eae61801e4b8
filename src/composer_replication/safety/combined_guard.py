"""Both guards behind one hook: the smoothed rules and the evidence, and a halt by either."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

from composer_replication.errors import CollapseStopError
from composer_replication.records import HeldoutReading
from composer_replication.safety.evidence_guard import EvidenceGuard, EvidenceStatus, verdict_of
from composer_replication.safety.heldout_guard import HeldOutGuard, TripwireStatus
from composer_replication.safety.saved_state import opened, saved

_LATCHED = "latched: "


@dataclass(frozen=True, slots=True)
class CombinedStatus(TripwireStatus):
    """What both guards say after one held-out reading.

    ``evidence`` is the status of ``EvidenceGuard``; the averages are those of ``HeldOutGuard``.
    What fired first comes first in ``reason``. ``insufficient_data``: less than ``min_steps``
    readings, or as ``EvidenceGuard`` says.
    """

    evidence: EvidenceStatus
    insufficient_data: bool

    @property
    def verdict(self) -> str:
        """``halted``, ``clean`` or ``INSUFFICIENT_DATA``."""
        return verdict_of(fire=self.fire, insufficient_data=self.insufficient_data)

    @property
    def evidence_figures(self) -> dict[str, float]:
        """What the trainer logs as ``killswitch/evidence_NAME``."""
        return self.evidence.figures


class CombinedGuard:
    """``HeldOutGuard`` and ``EvidenceGuard`` behind the trainer's hook; either one halts.

    A reading's score and the in-loop reward go to ``heldout``, its pairs and canary passes to
    ``evidence``, with ``evaluation_idx`` as the step and every infrastructure failure as a
    neutral task. ``round_idx`` (the global step) is a label only. The error guarantee is the
    evidence's alone: give ``heldout`` wide limits where only that shall halt.
    """

    def __init__(self, heldout: HeldOutGuard, evidence: EvidenceGuard) -> None:
        self.heldout = heldout
        self.evidence = evidence
        self.last_status: CombinedStatus | None = None
        self._fired_at = 0  # the evaluation
        self._first_reason = ""

    def update_from_reading(
        self,
        round_idx: int,
        reading: HeldoutReading,
        *,
        in_loop_reward: float,
        kl_to_init: float | None = None,
    ) -> CombinedStatus:
        """Fold one reading into both guards; a ValueError of either leaves both unchanged."""
        heldout = copy(self.heldout)
        heldout.update(
            round_idx, in_loop_reward=in_loop_reward, heldout_score=reading.score, kl_to_init=kl_to_init
        )
        neutral = reading.infrastructure_failures
        self.evidence.update(reading.evaluation_idx, reading.pairs, reading.canary_passes, neutral=neutral)
        self.heldout.load_state_dict(heldout.state_dict())
        if self.should_halt() and not self._fired_at:
            self._fired_at = self.evidence.num_evaluations
            self._first_reason = "; ".join(self._reasons())
        self.last_status = self._status()
        return self.last_status

    def update(
        self, round_idx: int, *, in_loop_reward: float, heldout_score: float, kl_to_init: float | None = None
    ) -> CombinedStatus:
        """Refuse a bare score: the evidence would see nothing, and no tripwire is silently inert."""
        del in_loop_reward, heldout_score, kl_to_init
        raise ValueError(
            f"round {round_idx} has a held-out score and no pairs: the evidence needs heldout_eval_fn "
            "to give a HeldoutReading"
        )

    def should_halt(self) -> bool:
        """Whether either guard has ever fired."""
        return self.heldout.should_halt() or self.evidence.should_halt()

    def raise_if_fired(self, status: Any = None) -> None:
        """Raise ``CollapseStopError`` with ``status``, by default the last one, when it has fired."""
        judged = self.last_status if status is None else status
        if judged is not None and judged.fire:
            raise CollapseStopError(judged)

    def state_dict(self) -> dict[str, Any]:
        """The state of both, JSON-safe and versioned."""
        return saved(
            "CombinedGuard",
            heldout=self.heldout.state_dict(),
            evidence=self.evidence.state_dict(),
            fired_at=self._fired_at,
            first_reason=self._first_reason,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; a ValueError of either guard leaves both unchanged."""
        opened(state, "CombinedGuard", "heldout", "evidence", "fired_at", "first_reason")
        heldout, evidence = copy(self.heldout), copy(self.evidence)
        heldout.load_state_dict(state["heldout"])
        evidence.load_state_dict(state["evidence"])
        fired_at, reason = state["fired_at"], state["first_reason"]
        if type(fired_at) is not int or not isinstance(reason, str) or (fired_at > 0) != bool(reason):
            raise ValueError(f"fired_at and first_reason do not fit: {fired_at!r}, {reason!r}")
        self.heldout.load_state_dict(state["heldout"])
        self.evidence.load_state_dict(state["evidence"])
        self._fired_at, self._first_reason = fired_at, reason
        self.last_status = self._status() if self.heldout.last_status else None

    def _reasons(self) -> list[str]:
        statuses = (self.heldout.last_status, self.evidence.last_status)
        return [status.reason.removeprefix(_LATCHED) for status in statuses if status and status.reason]

    def _status(self) -> CombinedStatus:
        heldout, evidence = self.heldout.last_status, self.evidence.last_status
        assert heldout is not None and evidence is not None  # asked after a reading only
        later = [reason for reason in self._reasons() if reason not in self._first_reason]
        is_latched = 0 < self._fired_at < self.evidence.num_evaluations
        reasons = "; ".join(filter(None, [self._first_reason, *later]))
        is_little = evidence.insufficient_data or heldout.num_updates < self.heldout.min_steps
        figures = asdict(heldout) | {
            "fire": self.should_halt(),
            "reason": (_LATCHED if is_latched else "") + reasons,
        }
        return CombinedStatus(**figures, evidence=evidence, insufficient_data=is_little)
