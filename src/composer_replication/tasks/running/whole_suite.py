"""Runs of a repository's whole suite before anything is deleted: one bad test does not end them for the others.

A test that hangs, ends or doubles the process, or whose file does so when it is imported, is left out and named; the
run goes on behind it. What is not reached in the time of a suite is left out, too.
"""

from __future__ import annotations

import time
from typing import Any

from composer_replication.records import Limits, Outcome
from composer_replication.tasks.intake.lock import UnusableRepository
from composer_replication.tasks.running.bench import Bench, run_alone
from composer_replication.tasks.suite_options import names_tried
from composer_replication.tasks.test_run import SANDBOX_LIMITS, Ended, TestReport, Trial

# --- Which limit of a sandbox a suite met before anything was deleted, and what can be typed then.

TOO_SLOW = "too-slow"
TOO_LARGE = "too-large"
MAX_SUITE_SECONDS = 86_400.0
_MORE_TIME = 3
_WITHOUT = "no flag raises it: give the folder or a copy of it without the tests that need more"


def cut_off(report: TestReport, suite_seconds: float, where: str = "") -> UnusableRepository:
    """The refusal of a suite whose run as a whole failed: at a limit, or else it is red. Names the test that was running.

    ``report`` is a run with an error, ``suite_seconds`` how long it had; ``where`` is said in front.
    """
    last = f"; {report.running} was running" if report.running else ""
    if report.ended is Ended.TIME:
        more = min(MAX_SUITE_SECONDS, _MORE_TIME * suite_seconds)
        return UnusableRepository(
            TOO_SLOW,
            f"{where}the suite ran longer than {suite_seconds:g} s; --suite-seconds {more:g} gives it more time{last}",
        )
    if report.ended in SANDBOX_LIMITS:
        limits = Limits()
        used = {
            Ended.MEMORY: f"{limits.memory_bytes // 1024**3} GiB of memory",
            Ended.DISK: f"{limits.disk_bytes // 1024**2} MiB of disk",
            Ended.PROCESSES: f"{limits.num_processes} processes",
        }[report.ended]
        return UnusableRepository(
            TOO_LARGE, f"{where}the suite used more than {used}, and was ended; {_WITHOUT}{last}"
        )
    return UnusableRepository("red-baseline", f"{where}{report.error}{last}")


# --- The runs themselves.

EACH_SECONDS = 30.0
"""Of one test, or the import of one file, by the clock; grading gives 20 s of processor time to all tests of a task."""
IDLE_SECONDS = 10.0
"""A test that waits so long for something does so for ever, or is too slow for grading."""
MAX_BAD_TESTS = 25


def run_suite(
    bench: Bench,
    *,
    map_calls: bool = False,
    shuffle_seed: int | None = None,
    backwards: bool = False,
    seconds: float | None = None,
) -> tuple[TestReport, dict[str, str]]:
    """One run of the whole suite, but for what the bench leaves out.

    Args:
        bench: where.
        map_calls: also note which functions each test calls; nothing is known of them where the run broke off.
        shuffle_seed: draws another order, as in ``Trial``.
        backwards: that order from its end.
        seconds: of all of it by the clock; None: as long as the bench gives to a suite.

    Returns:
        The report, as if it had been one run, and what was left out of it: why, by test or file.

    Raises:
        UnusableRepository: ``red-baseline``, ``too-slow`` or ``too-large``.
    """
    limit = bench.suite_seconds if seconds is None else seconds
    deadline = time.monotonic() + limit
    # What is known so far, of all parts of the run: each begins behind what ended the one before.
    reports: list[TestReport] = []
    outcomes: dict[str, Outcome] = {}
    collected: dict[str, None] = {}
    bad: dict[str, str] = {}
    while True:
        trial = Trial(
            bench.original, None, max(1.0, deadline - time.monotonic()),
            with_places=True, with_contexts=map_calls and not reports,
            shuffle_seed=shuffle_seed, backwards=backwards, left_out=sorted({*bench.left_out, *outcomes, *bad}),
            each_seconds=EACH_SECONDS, idle_seconds=IDLE_SECONDS,
        )  # fmt: skip
        report = run_alone(trial, bench.environment, backend=bench.backend)
        reports.append(report)
        outcomes |= report.done if report.error else report.outcomes
        collected |= dict.fromkeys(report.collected)
        if not report.error:
            break
        if report.ended is Ended.TIME and not report.broke and outcomes:
            late = [test for test in report.collected if test not in outcomes]
            bad |= dict.fromkeys(late, f"not reached in {limit:g} s")
            # What there was no time for says nothing against the suite.
            outcomes |= dict.fromkeys(late, Outcome.SKIPPED)
            break
        if not report.broke or report.ended in SANDBOX_LIMITS or len(bad) == MAX_BAD_TESTS:
            order = "" if shuffle_seed is None else "in another order, "
            raise cut_off(report, limit, order)
        bad[report.running] = report.broke
        if report.running in collected:
            outcomes[report.running] = Outcome.ERROR
    first = reports[0]
    joined = _joined(reports, outcomes, collected, bad) if first.error else first
    if not (joined.collected or joined.collect_errors or joined.skips):
        tried = names_tried(bench.original)
        raise UnusableRepository("red-baseline", f"no test is collected, looked for by {tried}")
    return joined, bad


def _joined(
    reports: list[TestReport], outcomes: dict[str, Outcome], collected: dict[str, None], bad: dict[str, str]
) -> TestReport:
    """The report of all parts as if it had been one run, with what was left out and why."""
    left_out = {name: f"left out: {reason}" for name, reason in bad.items()}
    joined: dict[str, dict[str, Any]] = {
        name: {key: value for report in reports for key, value in getattr(report, name).items()}
        for name in ("places", "collect_errors", "why", "skips")
    }
    tests = {name: reason for name, reason in left_out.items() if name in collected}
    files = {name: reason for name, reason in left_out.items() if name not in collected}
    return TestReport(
        outcomes,
        tuple(collected),
        error="",
        seconds=sum(report.seconds for report in reports),
        places=joined["places"],
        collect_errors={**files, **joined["collect_errors"]},
        why=tests | joined["why"] | tests,  # what ended a run comes first
        cpu_seconds=reports[0].cpu_seconds,
        skips=joined["skips"],
    )
