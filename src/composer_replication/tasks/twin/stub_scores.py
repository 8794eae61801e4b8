"""What solvers that understand nothing make of recorded behaviour: a constant, and a table of the recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.twin.twin_judge import subject_of
from composer_replication.tasks.twin.twin_records import Twin, TwinScore, score_digests
from composer_replication.tasks.twin.twin_run import Job, JobReport, Subject, play_apart

NUM_FIRST_CALLS = 5
"""A constant is asked for so many recorded calls before it is asked for all: nearly every one fails here."""

Player = Callable[[Sequence[Subject], Sequence[Job]], list[JobReport]]
"""Runs jobs over subjects; a report for each job."""

_LOOKUP = "None"
"""What a table of recorded calls answers to a call that it does not know."""


@dataclass(frozen=True, slots=True)
class StubScores:
    """``passed_by`` are the constants that pass a twin. ``lookup`` is the score of a table of all recorded calls:
    it knows these, and gives None for the mutated ones. ``failed`` is the report of the first run that came to no
    end, if there is one: then the scores mean nothing.
    """

    passed_by: tuple[str, ...]
    lookup: TwinScore
    failed: JobReport | None = None


def play_stubs(twins: Sequence[Twin], play_jobs: Player) -> list[StubScores]:
    """The scores of twins.

    A constant passes when it agrees in all recorded calls and 95% of the mutated ones, so one that misses one of
    the first ``NUM_FIRST_CALLS`` has its verdict; None alone replays everything at once, for ``lookup``.

    Args:
        twins: of functions of one repository.
        play_jobs: called twice at most, each constant a job of its own.
    """
    begun = [twin if text == _LOOKUP else _beginning(twin) for twin in twins for text in STUB_EXPRESSIONS]
    reports = _play(begun, STUB_EXPRESSIONS * len(twins), play_jobs)
    open_runs = [
        number
        for number, (twin, report) in enumerate(zip(begun, reports, strict=True))
        if STUB_EXPRESSIONS[number % len(STUB_EXPRESSIONS)] != _LOOKUP
        and score_digests(twin, report.digests, report.error).passed
    ]
    whole = [twins[number // len(STUB_EXPRESSIONS)] for number in open_runs]
    texts = [STUB_EXPRESSIONS[number % len(STUB_EXPRESSIONS)] for number in open_runs]
    for number, twin, report in zip(open_runs, whole, _play(whole, texts, play_jobs), strict=True):
        begun[number], reports[number] = twin, report
    size = len(STUB_EXPRESSIONS)
    return [
        _scores(begun[first : first + size], reports[first : first + size])
        for first in range(0, len(begun), size)
    ]


def _beginning(twin: Twin) -> Twin:
    return replace(
        twin, recorded=twin.recorded[:NUM_FIRST_CALLS], tests=twin.tests[:NUM_FIRST_CALLS], mutated=()
    )


def _play(twins: Sequence[Twin], constants: Sequence[str], play_jobs: Player) -> list[JobReport]:
    subjects = list(dict.fromkeys(subject_of(twin) for twin in twins))  # several constants share one
    numbers = {subject: number for number, subject in enumerate(subjects)}
    jobs = [
        Job(numbers[subject_of(twin)], "constant", {"constant": text})
        for twin, text in zip(twins, constants, strict=True)
    ]
    return play_jobs(subjects, jobs) if jobs else []


def _scores(twins: Sequence[Twin], reports: Sequence[JobReport]) -> StubScores:
    """Of one twin: for each constant the calls that it was asked for, and what came of them."""
    scores = [
        score_digests(twin, report.digests, report.error) for twin, report in zip(twins, reports, strict=True)
    ]
    none = scores[STUB_EXPRESSIONS.index(_LOOKUP)]
    return StubScores(
        passed_by=tuple(text for text, score in zip(STUB_EXPRESSIONS, scores, strict=True) if score.passed),
        lookup=replace(none, recorded_agree=none.num_recorded),
        failed=next((report for report in reports if report.error), None),
    )


def judge_stubs(
    files: Mapping[str, bytes],
    environment: Environment,
    twins: Sequence[Twin],
    *,
    backend: str | None = None,
) -> list[StubScores]:
    """The scores of stored twins, each constant in a process of its own.

    Args:
        files: the original tree.
        environment: in which its tests run.
        twins: of its functions.
        backend: sandbox backend; None for the best of this machine.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    return play_stubs(twins, partial(play_apart, files, environment, backend=backend))
