"""Evaluations that raise or hang: counted, survived, and a halt when they last."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from composer_replication.errors import CollapseStopError, InputError, SandboxFailure, UsageError
from composer_replication.rollouts.patient_evaluation import PatientEvaluation


def scripted(*steps: float | Exception | None) -> Callable[[], float | None]:
    left: Iterator[float | Exception | None] = iter(steps)

    def evaluate() -> float | None:
        step = next(left)
        if isinstance(step, Exception):
            raise step
        return step

    return evaluate


@pytest.mark.parametrize("error", [ValueError("a bug"), SandboxFailure("CR0390", "no jail"), OSError("disk")])
def test_two_missed_are_survived_and_the_third_in_a_row_halts(error: Exception) -> None:
    patient = PatientEvaluation(scripted(0.5, error, error, 0.25, error, error, error))
    assert [patient() for _ in range(6)] == [0.5, None, None, 0.25, None, None]
    with pytest.raises(CollapseStopError, match="3 held-out evaluations in a row were missed") as caught:
        patient()
    assert caught.value.exit_code == 5
    assert caught.value.status.fire is True
    assert str(error) in caught.value.status.reason
    assert patient.num_missed == 5


def test_not_due_neither_counts_nor_forgives() -> None:
    error = ValueError("x")
    patient = PatientEvaluation(scripted(error, None, error, None, error))
    for _ in range(4):
        patient()
    with pytest.raises(CollapseStopError):
        patient()


@pytest.mark.parametrize("error", [UsageError("CR0452", "no pool"), InputError("CR0411", "damaged")])
def test_a_mistake_of_the_user_is_raised_at_once(error: Exception) -> None:
    patient = PatientEvaluation(scripted(error))
    with pytest.raises(type(error)):
        patient()
    assert patient.num_missed == 0


def test_an_interruption_is_no_missed_evaluation() -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    patient = PatientEvaluation(interrupted)
    with pytest.raises(KeyboardInterrupt):
        patient()
    assert patient.num_missed == 0


def test_an_evaluation_that_hangs_is_missed() -> None:
    def hang() -> float:
        while True:
            time.sleep(0.01)

    before = signal.getsignal(signal.SIGALRM)
    patient = PatientEvaluation(hang, timeout_seconds=0.05)
    assert patient() is None
    assert "longer than 0.05 seconds" in patient.last_problem
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_outside_the_main_thread_nothing_is_interrupted_and_what_came_too_late_does_not_count() -> None:
    seen: list[str] = []

    def slow() -> float:
        time.sleep(0.05)
        seen.append("done")
        return 0.5

    patient = PatientEvaluation(slow, timeout_seconds=0.01)
    thread = threading.Thread(target=patient)
    thread.start()
    thread.join()
    assert seen == ["done"]
    assert patient.last_problem == "TimeoutError: it took longer than 0.01 seconds"


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        if self.calls % 2:
            raise ValueError("odd")
        return 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = state["calls"]


def test_a_restored_one_goes_on_counting_with_its_evaluation() -> None:
    first = PatientEvaluation(Counting())
    for _ in range(3):
        first()
    second = PatientEvaluation(Counting())
    second.load_state_dict(first.state_dict())
    assert (second.num_missed, second.missed_in_a_row) == (2, 1)
    assert second() == 0.5
    assert second.missed_in_a_row == 0


def test_state_of_another_version_is_refused() -> None:
    with pytest.raises(InputError, match="version 7"):
        PatientEvaluation(lambda: 0.5).load_state_dict({"version": 7})
