"""Both guards behind one hook: the smoothed rules and the evidence, and a halt by either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from composer_replication.errors import CollapseStopError
from composer_replication.records import HeldoutReading
from composer_replication.safety.checked_numbers import integer
from composer_replication.safety.evidence_guard import EvidenceGuard
from composer_replication.safety.evidence_status import EvidenceStatus, verdict_of
from composer_replication.safety.heldout_guard import HeldOutGuard, TripwireStatus
from composer_replication.safety.saved_state import opened_state

STATE_VERSION = 1
STATE_KIND = "CombinedGuard"
_STATE_KEYS = {"heldout", "evidence", "fired_at", "first_reason"}
_LATCHED = "latched: "


@dataclass(frozen=True, slots=True)
class CombinedStatus:
    """What both guards say after one held-out reading, or after one that was missed.

    Attributes:
        fire: the run must halt, by either guard.
        reason: empty, or why; what fired first comes first, and ``latched:`` before it on
            every event after the one that fired.
        heldout: the status of ``HeldOutGuard``; None before its first reading.
        evidence: the status of ``EvidenceGuard``.
        insufficient_data: either guard has seen too little: less than ``min_steps``
            readings, or as ``EvidenceGuard`` says.
    """

    fire: bool
    reason: str
    heldout: TripwireStatus | None
    evidence: EvidenceStatus
    insufficient_data: bool

    @property
    def halt(self) -> bool:
        """The same as ``fire``."""
        return self.fire

    @property
    def verdict(self) -> str:
        """``halted``, ``clean`` or ``INSUFFICIENT_DATA``."""
        return verdict_of(fire=self.fire, insufficient_data=self.insufficient_data)

    @property
    def round_idx(self) -> int | None:
        return None if self.heldout is None else self.heldout.round_idx

    @property
    def num_updates(self) -> int:
        return 0 if self.heldout is None else self.heldout.num_updates

    @property
    def in_loop_ema(self) -> float | None:
        return None if self.heldout is None else self.heldout.in_loop_ema

    @property
    def heldout_ema(self) -> float | None:
        return None if self.heldout is None else self.heldout.heldout_ema

    @property
    def kl_ema(self) -> float | None:
        return None if self.heldout is None else self.heldout.kl_ema

    @property
    def proxy_real_gap(self) -> float:
        return 0.0 if self.heldout is None else self.heldout.proxy_real_gap

    @property
    def decline_streak(self) -> int:
        return 0 if self.heldout is None else self.heldout.decline_streak

    @property
    def evidence_figures(self) -> dict[str, float]:
        """What the trainer logs as ``killswitch/evidence_NAME``."""
        return self.evidence.figures


class CombinedGuard:
    """``HeldOutGuard`` and ``EvidenceGuard`` behind the trainer's hook; either one halts.

    The trainer gives a guard that has ``update_from_reading`` the whole ``HeldoutReading``.
    Its score and the in-loop reward go to ``heldout``, its pairs and canary passes to
    ``evidence``, with ``evaluation_idx`` as the step and every infrastructure failure as a
    neutral task. ``round_idx`` (the global step) is a label only.

    The error guarantee is the evidence's alone: ``heldout`` may halt a clean run as often as
    its own docstring says. Give it wide limits where only the guarantee shall halt.

    Args:
        heldout: rules over smoothed averages.
        evidence: the detector with a guarantee.
    """

    def __init__(self, heldout: HeldOutGuard, evidence: EvidenceGuard) -> None:
        self.heldout = heldout
        self.evidence = evidence
        self.last_status: CombinedStatus | None = None
        self._fired_at = 0  # counted in the evidence's events: each event here is one there
        self._first_reason = ""

    def update_from_reading(
        self,
        round_idx: int,
        reading: HeldoutReading,
        *,
        in_loop_reward: float,
        kl_to_init: float | None = None,
    ) -> CombinedStatus:
        """Fold one reading into both guards.

        Raises:
            ValueError: either guard refuses a number or the step; both are unchanged.
        """
        before = self.heldout.state_dict()
        self.heldout.update(
            round_idx, in_loop_reward=in_loop_reward, heldout_score=reading.score, kl_to_init=kl_to_init
        )
        try:
            self.evidence.update(
                reading.evaluation_idx,
                reading.pairs,
                reading.canary_passes,
                neutral=reading.infrastructure_failures,
            )
        except ValueError:
            self.heldout.load_state_dict(before)
            raise
        return self._after_event()

    def update(
        self, round_idx: int, *, in_loop_reward: float, heldout_score: float, kl_to_init: float | None = None
    ) -> CombinedStatus:
        """Refuse a bare score: the evidence would see nothing, and no tripwire is silently inert.

        Raises:
            ValueError: always; ``heldout_eval_fn`` must give a ``HeldoutReading``.
        """
        del in_loop_reward, heldout_score, kl_to_init
        raise ValueError(
            f"round {round_idx} has a held-out score and no pairs: the evidence needs heldout_eval_fn "
            "to give a HeldoutReading"
        )

    def note_missed(self, reason: str) -> CombinedStatus:
        """Count an evaluation that raised or hung; several in a row halt, see ``EvidenceGuard``."""
        self.evidence.note_missed(reason)
        return self._after_event()

    def should_halt(self) -> bool:
        """Whether either guard has ever fired."""
        return self.heldout.should_halt() or self.evidence.should_halt()

    def raise_if_fired(self, status: Any = None) -> None:
        """Raise when ``status``, by default the last one, has fired.

        Raises:
            CollapseStopError: it fired; the error carries the very status.
        """
        judged = self.last_status if status is None else status
        if judged is not None and judged.fire:
            raise CollapseStopError(judged)

    def state_dict(self) -> dict[str, Any]:
        """The state of both, JSON-safe and versioned."""
        return {
            "version": STATE_VERSION,
            "kind": STATE_KIND,
            "heldout": self.heldout.state_dict(),
            "evidence": self.evidence.state_dict(),
            "fired_at": self._fired_at,
            "first_reason": self._first_reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            ValueError: not a state of this class, or either guard refuses its part; nothing changed.
        """
        opened_state(state, kind=STATE_KIND, version=STATE_VERSION, keys=_STATE_KEYS)
        before = self.heldout.state_dict(), self.evidence.state_dict()
        try:
            self.heldout.load_state_dict(state["heldout"])
            self.evidence.load_state_dict(state["evidence"])
            fired_at, reason = integer("fired_at", state["fired_at"]), state["first_reason"]
            is_whole = isinstance(reason, str) and bool(reason) == (fired_at > 0) == self.should_halt()
            if not is_whole or not 0 <= fired_at <= self.evidence.num_events:
                raise ValueError("the state contradicts itself: it is damaged or was changed by hand")
        except ValueError:
            self.heldout.load_state_dict(before[0])
            self.evidence.load_state_dict(before[1])
            raise
        self._fired_at, self._first_reason = fired_at, reason
        self.last_status = self._status() if self.evidence.num_events else None

    def _after_event(self) -> CombinedStatus:
        if self.should_halt() and not self._fired_at:
            self._fired_at = self.evidence.num_events
            self._first_reason = "; ".join(self._reasons())
        self.last_status = self._status()
        return self.last_status

    def _reasons(self) -> list[str]:
        statuses = (self.heldout.last_status, self.evidence.last_status)
        return [status.reason.removeprefix(_LATCHED) for status in statuses if status and status.reason]

    def _status(self) -> CombinedStatus:
        evidence, heldout = self.evidence.last_status, self.heldout.last_status
        assert evidence is not None  # asked after an event only
        later = [reason for reason in self._reasons() if reason not in self._first_reason]
        is_latched = 0 < self._fired_at < self.evidence.num_events
        num_updates = 0 if heldout is None else heldout.num_updates
        return CombinedStatus(
            fire=self.should_halt(),
            reason=(_LATCHED if is_latched else "") + "; ".join(filter(None, [self._first_reason, *later])),
            heldout=heldout,
            evidence=evidence,
            insufficient_data=evidence.insufficient_data or num_updates < self.heldout.min_steps,
        )
