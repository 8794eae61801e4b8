"""Judge a candidate by the twin of the function that it writes anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from composer_replication.records import Limits
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.twin.twin_records import Twin, TwinScore, damaged, score_digests
from composer_replication.tasks.twin.twin_run import (
    WALL_FACTOR,
    Job,
    JobReport,
    RecordedFunction,
    pickler_fingerprint,
    play,
    play_apart,
)


def function_of(twin: Twin) -> RecordedFunction:
    """A twin's function and inputs, as the player takes them; no digest is among them."""
    return RecordedFunction(twin.path, twin.symbol, tuple(vector.blob for vector in twin.vectors))


def _check_pickler(twin: Twin) -> None:
    if twin.pickler != pickler_fingerprint():
        raise damaged("the recorded behaviour needs another version of cloudpickle", twin.pin)


def judge_twin(
    tree_files: Mapping[str, bytes],
    environment: Environment,
    twin: Twin,
    *,
    backend: str | None = None,
    limits: Limits | None = None,
    timeout_seconds: float,
) -> TwinScore:
    """Does a candidate do what the golden code did?

    The candidate runs in a fresh sandbox of its own. It gets the inputs; its canonical
    digests come out and are compared here. A call that is missing, hangs (1 s of processor time)
    or takes down its process disagrees.

    Args:
        tree_files: the candidate's tree; tests are not needed in it.
        environment: as when the twin was built.
        twin: of the deleted function.
        backend: sandbox backend; None for the best of this machine.
        limits: of the sandbox.
        timeout_seconds: of processor time; past it the whole run is a failure of the candidate. By the clock it may
            take ``WALL_FACTOR`` times as long, so that a busy machine fails nobody.

    Raises:
        InputError: the twin needs another cloudpickle than this installation has (CR0411).
    """
    _check_pickler(twin)
    reports, problem = play(
        tree_files,
        environment,
        [Job(function_of(twin))],
        backend=backend,
        limits=limits,
        timeout_seconds=WALL_FACTOR * timeout_seconds,
        job_seconds=timeout_seconds,
    )
    report = reports[0]
    return score_digests(twin, report.digests, problem or report.error)


def judge_twins(bench: Bench, twins: Sequence[Twin]) -> list[TwinScore]:
    """Judge the tree of a bench, which is of our own making, by several twins: one sandbox, a process for each.

    A policy's code gets ``judge_twin``, for it could harm its neighbours here.
    """
    for twin in twins:
        _check_pickler(twin)
    jobs = [Job(function_of(twin)) for twin in twins]
    reports = play_apart(bench, jobs, job_seconds=bench.suite_seconds)
    return [
        score_digests(twin, report.digests, report.error) for twin, report in zip(twins, reports, strict=True)
    ]


# --- What solvers that understand nothing make of recorded behaviour: a constant, and a table of the recorded calls.

Player = Callable[[Sequence[Job]], list[JobReport]]
"""Runs jobs; a report for each."""

_LOOKUP = "None"
"""What a table of recorded calls answers to a call that it does not know."""


@dataclass(frozen=True, slots=True)
class StubScores:
    """``passed_by`` are the constants that pass a twin. ``lookup`` is the score of a table of all recorded calls:
    it knows these, and gives None for the mutated ones. Where ``report`` has an error, the scores mean nothing.
    """

    passed_by: tuple[str, ...]
    lookup: TwinScore
    report: JobReport


def play_stubs(twins: Sequence[Twin], play_jobs: Player) -> list[StubScores]:
    """The scores of twins of functions of one repository; ``play_jobs`` is called once.

    A constant passes when it agrees in all recorded calls and 95% of the mutated ones. All constants are digested
    in one pass over the calls, because without the function a call costs what its arguments cost.
    """
    jobs = [Job(function_of(twin), "constants", {"constants": STUB_EXPRESSIONS}) for twin in twins]
    reports = play_jobs(jobs) if jobs else []
    return [_scores(twin, report) for twin, report in zip(twins, reports, strict=True)]


def _scores(twin: Twin, report: JobReport) -> StubScores:
    """Each digest of the report is one text: those of all constants, in their order."""
    digests = {index: text.split() for index, text in report.digests.items()}
    scores = {
        constant: score_digests(twin, {index: one[place] for index, one in digests.items()}, report.error)
        for place, constant in enumerate(STUB_EXPRESSIONS)
    }
    none = scores[_LOOKUP]
    passed_by = tuple(constant for constant, score in scores.items() if score.passed)
    return StubScores(passed_by, replace(none, recorded_agree=none.num_recorded), report)
