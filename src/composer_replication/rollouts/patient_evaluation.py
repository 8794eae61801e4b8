"""A held-out evaluation that breaks or hangs must not end a run, and must not go unseen."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from composer_replication.errors import CollapseStopError, ComposerError, InputError, SandboxFailure
from composer_replication.interfaces import Stateful
from composer_replication.records import HeldoutReading

logger = logging.getLogger(__name__)

STATE_VERSION = 1
MAX_MISSED_IN_A_ROW = 3

Reading = TypeVar("Reading", bound=float | HeldoutReading)


class PatientEvaluation(Generic[Reading]):
    """``heldout_eval_fn`` around another one: a missed evaluation is counted, not fatal.

    Missed is one that raises, or that takes longer than ``timeout_seconds``: it answers None (not due) and the run goes
    on without a reading. The third in a row halts the run (``CollapseStopError``, CR0601), since a guard without readings
    guards nothing. A mistake in the recipe or the input is raised at once, as the evaluation raised it.

    Args:
        evaluation: the evaluation; its ``state_dict`` is kept with this one's where it has one.
        timeout_seconds: of one evaluation; None for no limit. It is an alarm signal, so it
            works in the main thread only and interrupts Python code, not a single call of a
            library; leave it off where weights are sharded over processes, and rely on
            ``trl.ddp_timeout`` there.

    ``num_missed`` counts all so far, ``last_problem`` is what the newest missed one said.
    """

    def __init__(
        self, evaluation: Callable[[], Reading | None], *, timeout_seconds: float | None = None
    ) -> None:
        self.evaluation, self.timeout_seconds = evaluation, timeout_seconds
        self.num_missed = self.missed_in_a_row = 0
        self.last_problem = ""
        candidate: Any = evaluation
        self._stateful: Stateful | None = candidate if isinstance(candidate, Stateful) else None

    def __call__(self) -> Reading | None:
        try:
            with deadline(self.timeout_seconds):
                reading = self.evaluation()
        except Exception as error:
            if isinstance(error, ComposerError) and not isinstance(error, SandboxFailure):
                raise
            self.num_missed += 1
            self.missed_in_a_row += 1
            self.last_problem = f"{type(error).__name__}: {error}"
            counts = f"{self.missed_in_a_row} in a row, {self.num_missed} in all"
            is_known = isinstance(error, SandboxFailure | TimeoutError)
            logger.warning(
                "held-out evaluation missed (%s): %s", counts, self.last_problem, exc_info=not is_known
            )
            if self.missed_in_a_row < MAX_MISSED_IN_A_ROW:
                return None
            reason = (
                f"{self.missed_in_a_row} held-out evaluations in a row were missed, so nothing watches the "
                f"reward; the last one said {self.last_problem}"
            )
            raise CollapseStopError(SimpleNamespace(fire=True, reason=reason, proxy_real_gap=0.0)) from error
        if reading is not None:
            self.missed_in_a_row = 0
        return reading

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "num_missed": self.num_missed,
            "missed_in_a_row": self.missed_in_a_row,
            "evaluation": None if self._stateful is None else self._stateful.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            problem = f"held-out evaluation state version {state.get('version')} is not {STATE_VERSION}."
            raise InputError("CR0401", problem)
        self.num_missed, self.missed_in_a_row = int(state["num_missed"]), int(state["missed_in_a_row"])
        if self._stateful is not None:
            self._stateful.load_state_dict(state["evaluation"])


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """A ``TimeoutError`` in what takes longer: at once in the main thread, where there is an alarm; elsewhere at its end."""
    if seconds is None:
        yield
        return

    def ring(*_signal: object) -> None:
        raise TimeoutError(f"it took longer than {seconds:g} seconds")

    began, has_alarm = time.monotonic(), threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, ring) if has_alarm else None
    try:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    if time.monotonic() - began > seconds:
        ring()  # it caught the alarm, or ran where there is none: what came too late does not count
