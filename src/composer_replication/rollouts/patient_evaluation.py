"""A held-out evaluation that breaks or hangs must not end a run, and must not go unseen."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from composer_replication.errors import CollapseStopError, ComposerError, InputError, SandboxFailure
from composer_replication.interfaces import Stateful
from composer_replication.records import HeldoutReading

logger = logging.getLogger(__name__)

STATE_VERSION = 1
MAX_MISSED_IN_A_ROW = 3

Reading = TypeVar("Reading", bound=float | HeldoutReading)


@dataclass(frozen=True, slots=True)
class MissedStatus:
    """Why a run halts although no guard fired: nobody knows the truth any more."""

    reason: str
    fire: bool = True
    in_loop_ema: float | None = None
    heldout_ema: float | None = None
    kl_ema: float | None = None
    proxy_real_gap: float = 0.0


class PatientEvaluation(Generic[Reading]):
    """``heldout_eval_fn`` around another one: a missed evaluation is counted, not fatal.

    Missed is one that raises, or that takes longer than ``timeout_seconds``: it answers None
    (not due) and the run goes on without a reading. The third in a row halts the run, since a
    guard without readings guards nothing. A mistake in the recipe or the input is raised at once.

    Args:
        evaluation: the evaluation; its ``state_dict`` is kept with this one's where it has one.
        timeout_seconds: of one evaluation; None for no limit. It is an alarm signal, so it
            works in the main thread only and interrupts Python code, not a single call of a
            library; leave it off where weights are sharded over processes, and rely on
            ``trl.ddp_timeout`` there.

    Attributes:
        num_missed: evaluations missed so far, in all.
        last_problem: what the newest missed one said.

    Raises:
        CollapseStopError: too many were missed in a row (CR0601).
        ComposerError: a mistake in recipe or input, as the evaluation raised it.
    """

    def __init__(
        self, evaluation: Callable[[], Reading | None], *, timeout_seconds: float | None = None
    ) -> None:
        self.evaluation = evaluation
        self.timeout_seconds = timeout_seconds
        self.num_missed = 0
        self.missed_in_a_row = 0
        self.last_problem = ""
        candidate: Any = evaluation
        self._stateful: Stateful | None = candidate if isinstance(candidate, Stateful) else None

    def __call__(self) -> Reading | None:
        began = time.monotonic()
        try:
            with deadline(self.timeout_seconds):
                reading = self.evaluation()
            if self.timeout_seconds is not None and time.monotonic() - began > self.timeout_seconds:
                # It caught the alarm, or ran where there is none: what came too late does not count.
                raise TimeoutError(f"it took longer than {self.timeout_seconds:g} seconds")
        except SandboxFailure as error:
            self._missed(error)
            return None
        except ComposerError:
            raise
        except Exception as error:  # noqa: BLE001 - counted, reported, and raised as a halt when it lasts
            self._missed(error)
            return None
        if reading is not None:
            self.missed_in_a_row = 0
        return reading

    def _missed(self, error: Exception) -> None:
        self.num_missed += 1
        self.missed_in_a_row += 1
        self.last_problem = f"{type(error).__name__}: {error}"
        logger.warning(
            "held-out evaluation missed (%d in a row, %d in all): %s",
            self.missed_in_a_row,
            self.num_missed,
            self.last_problem,
            exc_info=not isinstance(error, SandboxFailure | TimeoutError),
        )
        if self.missed_in_a_row >= MAX_MISSED_IN_A_ROW:
            raise CollapseStopError(
                MissedStatus(
                    f"{self.missed_in_a_row} held-out evaluations in a row were missed, so nothing watches the "
                    f"reward; the last one said {self.last_problem}"
                )
            ) from error

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "num_missed": self.num_missed,
            "missed_in_a_row": self.missed_in_a_row,
            "evaluation": None if self._stateful is None else self._stateful.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise InputError(
                "CR0401", f"held-out evaluation state version {state.get('version')} is not {STATE_VERSION}."
            )
        self.num_missed = int(state["num_missed"])
        self.missed_in_a_row = int(state["missed_in_a_row"])
        if self._stateful is not None:
            self._stateful.load_state_dict(state["evaluation"])


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise a ``TimeoutError`` in what runs inside after ``seconds``; in the main thread only, else without effect."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_signal: object) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
