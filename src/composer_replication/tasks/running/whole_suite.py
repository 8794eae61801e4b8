"""Runs of a repository's whole suite before anything is deleted: one bad test does not end them for the others.

A test that hangs, ends or doubles the process, or whose file does so when it is imported, is left out and named; the
run goes on behind it. What is not reached in the time of a suite is left out, too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from composer_replication.records import Limits, Outcome
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.lock import UnusableRepository
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.suite_options import names_tried, suite_arguments
from composer_replication.tasks.test_run import Ended, TestReport, run_tests
from composer_replication.tasks.views import write_files

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
    if report.ended in _LIMITS:
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


# --- Runs of a repository's whole suite before anything is deleted: one bad test does not end them for the others.

EACH_SECONDS = 30.0
"""Of one test, or the import of one file, by the clock; grading gives 20 s of processor time to all tests of a task."""
IDLE_SECONDS = 10.0
"""A test that waits so long for something does so for ever, or is too slow for grading."""
MAX_BAD_TESTS = 25
_LIMITS = (Ended.MEMORY, Ended.DISK, Ended.PROCESSES)


@dataclass(slots=True)
class _Parts:
    """What is known so far of one run of the suite: of all its parts, each begun behind what ended the one before."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    collected: dict[str, None] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)

    def add(self, report: TestReport) -> None:
        self.outcomes |= report.done if report.error else report.outcomes
        self.collected |= dict.fromkeys(report.collected)

    def set_aside(self, names: Iterable[str], reason: str, outcome: Outcome = Outcome.ERROR) -> None:
        for name in names:
            self.bad[name] = reason
            if name in self.collected:
                self.outcomes[name] = outcome


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
        shuffle_seed: draws another order, as in ``run_tests``.
        backwards: that order from its end.
        seconds: of all of it by the clock; None: as long as the bench gives to a suite.

    Returns:
        The report, as if it had been one run, and what was left out of it: why, by test or file.

    Raises:
        UnusableRepository: ``red-baseline``, ``too-slow`` or ``too-large``.
    """
    limit = bench.suite_seconds if seconds is None else seconds
    deadline = time.monotonic() + limit
    parts = _Parts()
    reports: list[TestReport] = []
    while True:
        with tempfile.TemporaryDirectory(prefix="baseline-", dir=process_folder()) as folder:
            tree = Path(folder) / "tree"
            write_files(tree, bench.original)
            arguments = suite_arguments(tree)
            report = run_tests(
                tree, bench.environment, None, backend=bench.backend, with_places=True, with_contexts=map_calls and not reports,
                timeout_seconds=max(1.0, deadline - time.monotonic()), shuffle_seed=shuffle_seed, backwards=backwards,
                left_out=sorted({*bench.left_out, *parts.outcomes, *parts.bad}),
                each_seconds=EACH_SECONDS, idle_seconds=IDLE_SECONDS,
            )  # fmt: skip
        reports.append(report)
        parts.add(report)
        if not report.error:
            break
        if report.ended is Ended.TIME and not report.broke and parts.outcomes:
            late = [test for test in report.collected if test not in parts.outcomes]
            # skipped: what there was no time for says nothing against the suite
            parts.set_aside(late, f"not reached in {limit:g} s", Outcome.SKIPPED)
            break
        if not report.broke or report.ended in _LIMITS or len(parts.bad) == MAX_BAD_TESTS:
            order = "" if shuffle_seed is None else "in another order, "
            raise cut_off(report, limit, order)
        parts.set_aside([report.running], report.broke)
    joined = _joined(reports, parts)
    if not (joined.collected or joined.collect_errors or joined.skips):
        tried = names_tried(bench.original, arguments)
        raise UnusableRepository("red-baseline", f"no test is collected, looked for by {tried}")
    return joined, parts.bad


def _joined(reports: list[TestReport], parts: _Parts) -> TestReport:
    first = reports[0]
    if not first.error:
        return first
    files = {name: f"left out: {reason}" for name, reason in parts.bad.items() if name not in parts.collected}
    tests = {name: f"left out: {reason}" for name, reason in parts.bad.items() if name in parts.collected}
    joined = {
        name: {key: value for report in reports for key, value in getattr(report, name).items()}
        for name in ("places", "collect_errors", "why", "skips")
    }
    return replace(
        first,
        outcomes=parts.outcomes,
        collected=tuple(parts.collected),
        error="",
        seconds=sum(report.seconds for report in reports),
        places=joined["places"],
        collect_errors={**files, **joined["collect_errors"]},
        why={**tests, **{test: text for test, text in joined["why"].items() if test not in tests}},
        skips=joined["skips"],
        contexts={},
        running="",
        broke="",
        done={},
        ended=Ended.BY_ITSELF,
    )
