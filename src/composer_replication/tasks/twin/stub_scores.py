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

Player = Callable[[Sequence[Subject], Sequence[Job]], list[JobReport]]
"""Runs jobs over subjects; a report for each job."""

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
    jobs = [Job(number, "constants", {"constants": STUB_EXPRESSIONS}) for number in range(len(twins))]
    reports = play_jobs([subject_of(twin) for twin in twins], jobs) if jobs else []
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


def judge_stubs(
    files: Mapping[str, bytes],
    environment: Environment,
    twins: Sequence[Twin],
    *,
    backend: str | None = None,
) -> list[StubScores]:
    """The scores of stored twins, over the original tree; raises SandboxFailure when the sandbox broke."""
    return play_stubs(twins, partial(play_apart, files, environment, backend=backend))
