"""What solvers that understand nothing make of recorded behaviour: a constant, and a table of the recorded calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.twin.twin_judge import PLAY_SECONDS, RELATIVE_LIMITS, subject_of
from composer_replication.tasks.twin.twin_records import Twin, TwinScore, score_digests
from composer_replication.tasks.twin.twin_run import Job, JobReport, play


@dataclass(frozen=True, slots=True)
class StubScores:
    """``passed_by`` are the constants that pass a twin. ``lookup`` is the score of a table of all recorded calls:
    it knows these, and gives None for the mutated ones. ``error`` is empty, or why one of them has no score.
    """

    passed_by: tuple[str, ...]
    lookup: TwinScore
    error: str = ""


def stub_jobs(num_twins: int) -> list[Job]:
    """The jobs of a player that replay each twin with each constant in the place of its function, twin by twin."""
    return [
        Job(number, "constant", {"constant": expression})
        for number in range(num_twins)
        for expression in STUB_EXPRESSIONS
    ]


def reports_of(number: int, reports: Sequence[JobReport]) -> Sequence[JobReport]:
    """Those of one twin among the reports of ``stub_jobs``."""
    first = number * len(STUB_EXPRESSIONS)
    return reports[first : first + len(STUB_EXPRESSIONS)]


def stub_scores(twin: Twin, reports: Sequence[JobReport]) -> StubScores:
    """The scores of a twin from its own reports, one for each constant."""
    scores = [score_digests(twin, report.digests, report.error) for report in reports]
    none = scores[STUB_EXPRESSIONS.index("None")]
    return StubScores(
        passed_by=tuple(text for text, score in zip(STUB_EXPRESSIONS, scores, strict=True) if score.passed),
        lookup=replace(none, recorded_agree=none.num_recorded),
        error=next((report.error for report in reports if report.error), ""),
    )


def judge_stubs(
    files: Mapping[str, bytes],
    environment: Environment,
    twins: Sequence[Twin],
    *,
    backend: str | None = None,
) -> list[StubScores]:
    """The scores of stored twins, all in one sandbox, each constant in a process of its own.

    Args:
        files: the original tree.
        environment: in which its tests run.
        twins: of its functions.
        backend: sandbox backend; None for the best of this machine.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    if not twins:
        return []
    reports, problem = play(
        files,
        environment,
        [subject_of(twin) for twin in twins],
        stub_jobs(len(twins)),
        backend=backend,
        limits=RELATIVE_LIMITS,
        timeout_seconds=PLAY_SECONDS,
    )
    scores = [stub_scores(twin, reports_of(number, reports)) for number, twin in enumerate(twins)]
    return [replace(score, error=problem or score.error) for score in scores]
