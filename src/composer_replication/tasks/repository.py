"""Bring one repository to the start line: files, locked environment, a suite that is green in any order."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from composer_replication.errors import InputError
from composer_replication.records import Outcome
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.environment import (
    Environment,
    EnvironmentLock,
    UnusableRepository,
    lock_of,
    open_environment,
)
from composer_replication.tasks.intake.licences import read_licence
from composer_replication.tasks.intake.requirements import (
    explain,
    lock_repository,
    modules_missing,
    refuse_second_copy,
    wants_older_pytest,
)
from composer_replication.tasks.intake.sources import RepositorySource
from composer_replication.tasks.planning.body_cuts import Deletion
from composer_replication.tasks.planning.candidates import find_deletions
from composer_replication.tasks.running.bench import Bench, run_alone
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RUN_FACTOR, SUITE_SECONDS, RepositoryRecord
from composer_replication.tasks.suite_options import names_tried
from composer_replication.tasks.test_run import Ended, TestReport, Trial
from composer_replication.tasks.workers import OWN_THREADS, Workers

# --- Which limit of a sandbox a suite met before anything was deleted, and what can be typed then.

MAX_SUITE_SECONDS = 86_400.0
_REASONS = {Ended.TIME: "too-slow", Ended.LIMIT: "too-large"}


def cut_off(report: TestReport, suite_seconds: float) -> UnusableRepository:
    """The refusal of a suite whose run of so many seconds failed as a whole, with the test that was running."""
    said, more = report.error, min(MAX_SUITE_SECONDS, 3 * suite_seconds)
    if report.ended is Ended.TIME:
        slow = f"the suite ran longer than {suite_seconds:g} s; --suite-seconds {more:g} gives it more time"
        said = report.broke or slow
    last = f"; {report.running} was running" if report.running else ""
    return UnusableRepository(_REASONS.get(report.ended, "red-baseline"), f"{said}{last}")


# --- Runs of the whole suite before anything is deleted: one bad test does not end them for the others.
# A test that hangs, ends or doubles the process, or whose file does so when it is imported, is left out and named, and the suite
# is run again without it. What is not reached in the time of a suite is left out, too.

MAX_BAD_TESTS = 10


def run_suite(bench: Bench, order: int = 0, *, with_calls: bool = False) -> tuple[TestReport, dict[str, str]]:
    """The whole suite, but for what the bench leaves out: its report, and what was left out of it, by test or file, and why.

    ``order`` 0 is that of the files, 1 one that ``SHUFFLE_SEED`` draws, 2 that one from its end. ``with_calls`` also notes which
    functions are called (nothing where time ran out), which takes time. UnusableRepository: ``red-baseline``, ``too-slow`` or ``too-large``.
    """
    limit = bench.suite_seconds
    bad: dict[str, str] = {}
    while True:
        trial = Trial(
            bench.original, None, limit, with_calls=with_calls, backwards=order == 2,
            shuffle_seed=SHUFFLE_SEED if order else None, left_out=sorted({*bench.left_out, *bad}),
        )  # fmt: skip
        report = run_alone(trial, bench.environment, backend=bench.backend)
        if not report.error:
            break
        if report.ended is Ended.TIME and report.done and not report.broke:
            # What there was no time for says nothing against the suite.
            late = [test for test in report.collected if test not in report.done]
            bad |= dict.fromkeys(late, f"not reached in {limit:g} s")
            outcomes = {**report.done, **dict.fromkeys(late, Outcome.SKIPPED)}
            report = replace(report, outcomes=outcomes, error="")
            break
        is_named = report.broke and report.running not in {"", *bad}
        if not is_named or report.ended is Ended.LIMIT or len(bad) == MAX_BAD_TESTS:
            raise cut_off(report, limit)
        bad[report.running] = report.broke
    tests = {name: f"left out: {did}" for name, did in bad.items() if "::" in name}
    files = {name: f"left out: {did}" for name, did in bad.items() if name not in tests}
    outcomes = {**dict.fromkeys(tests, Outcome.ERROR), **report.outcomes}
    report = replace(
        report,
        outcomes=outcomes,
        collected=tuple(dict.fromkeys([*report.collected, *outcomes])),
        collect_errors={**files, **report.collect_errors},
        why={**tests, **report.why},  # what ended a run comes first
    )
    if not (report.collected or report.collect_errors or report.skips):
        raise UnusableRepository(
            "red-baseline", f"no test is collected, looked for by {names_tried(bench.original)}"
        )
    return report, bad


# --- Files, environment and suite together.

TEST_SECONDS = 20.0
"""Processor time that a run of a task's tests has, as in grading; ``gates`` says how much of it golden code may need."""
MAX_LOOKS = 4
"""So many environments are tried until a run misses nothing that can be had."""
MIN_GREEN_SHARE = 0.5
SHUFFLE_SEED = 0
"""Draws the order of later baseline runs. Fixed: a store's tests must not hang on a build's seed."""


@dataclass(frozen=True, slots=True)
class PreparedRepository:
    """A repository whose candidates can be judged; ``first_reason`` is why its first test is not used, where it was run now."""

    slug: str
    record: RepositoryRecord
    bench: Bench
    deletions: tuple[Deletion, ...]
    first_reason: str = ""

    def by_pin(self, pin: str) -> Deletion | None:
        """The deletion that a pin names; a path may leave out the ``src/`` before it."""
        return next((d for d in self.deletions if pin in (d.pin, d.pin.removeprefix("src/"))), None)


def slug_of(repository: str) -> str:
    """``NAME==VERSION`` as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", repository.replace("==", "-")).strip("-")


def prepare(
    source: RepositorySource,
    store: TaskStore,
    *,
    workers: Workers = OWN_THREADS,
    with_calls: bool = True,
    jobs: int = 1,
    sizes: Collection[tuple[str, str]] = (("function", "body"),),
    suite_seconds: float = SUITE_SECONDS,
) -> PreparedRepository:
    """Lock, install, run the suite three times, and keep all of it in the store.

    What an earlier build of the same bytes in the same time kept is used again. ``workers`` run the suite, ``jobs`` at a
    time. ``with_calls`` notes which functions are called, for candidates that nobody pinned; ``sizes`` are the (granularity,
    removal) pairs to plan, ``suite_seconds`` are how long by the clock a whole suite may run.
    """
    slug, files = slug_of(source.repository), {path: sha256_of(data) for path, data in source.files.items()}
    asked: dict[str, Any] = {
        "source_sha256": source.sha256,
        "files": files,
        "licence": read_licence(source.files, source.metadata),
        "commit": source.commit,
        "suite_seconds": suite_seconds,
        "source": source.origin,
    }
    first_reason = ""
    kept = store.repository(slug) if store.has_record(f"repositories/{slug}.json") else None
    knows_calls = kept is not None and (kept.called is not None or not with_calls)
    if kept is not None and knows_calls and replace(kept, **asked) == kept:
        record, environment = kept, store.environment_of(kept.environment)
        if kept.called is not None and not with_calls:  # the bytes of a store follow from what is asked now
            record = replace(kept, called=None)
            store.put_repository(slug, record)
        bench = make_bench(source.files, environment, store.backend, suite_seconds)
    else:
        begun = _with_what_is_missing(source, workers, store.backend, suite_seconds, with_calls=with_calls)
        bench, first, bad = begun
        try:
            runs, left_out = _three_runs(begun, workers, jobs, with_calls=with_calls)
        except UnusableRepository as error:
            raise explain(error, source) from error
        passed = frozenset.union(*(run.passed for run in runs))
        green = frozenset.intersection(*(run.passed for run in runs))
        record = RepositoryRecord(
            repository=source.repository,
            environment=bench.environment.fingerprint,
            places={test: first.places[test] for test in sorted(green)},
            num_collected=len(first.collected),
            broken_files=tuple(sorted(set(first.collect_errors) - set(bad))),
            called=next((run.called for run in runs if run.called), frozenset() if with_calls else None),
            flaky=tuple(sorted(passed - green)),
            left_out=left_out,
            **asked,
        )
        store.put_lock(lock_of(bench.environment))
        for data in source.files.values():
            store.put_blob(data)
        store.put_repository(slug, record)
        first_reason = _first_reason(first, passed)
    bench = replace(bench, left_out=record.left_out)
    return PreparedRepository(slug, record, bench, find_deletions(source.files, sizes), first_reason)


def make_bench(
    files: Mapping[str, bytes],
    environment: Environment,
    backend: str | None,
    suite_seconds: float = SUITE_SECONDS,
    left_out: tuple[str, ...] = (),
) -> Bench:
    """A bench with the usual time limits: nothing here waits longer than a baseline may."""
    return Bench(files, environment, backend, RUN_FACTOR * suite_seconds, TEST_SECONDS, left_out)


FirstRun = tuple[Bench, TestReport, dict[str, str]]
"""Where the suite was run first, its report, and what was left out of it and why."""


def _with_what_is_missing(
    source: RepositorySource,
    workers: Workers,
    backend: str | None,
    suite_seconds: float,
    *,
    with_calls: bool,
) -> FirstRun:
    """The environment in which most tests are green, with the first run there.

    What the run before missed is added where the repository declares it; the runner is an earlier one where the tests
    show that they were written for it.
    """
    best: FirstRun | None = None
    problem: UnusableRepository | InputError | None = None
    seen: list[EnvironmentLock] = []
    missing: frozenset[str] = frozenset()
    too_new = ""
    while len(seen) < MAX_LOOKS:
        try:
            lock = lock_repository(source, missing, too_new)
            if lock in seen:
                break
            seen.append(lock)
            environment = open_environment(lock, backend=backend)
            refuse_second_copy(source, environment)
            bench = make_bench(source.files, environment, backend, suite_seconds)
        except (UnusableRepository, InputError) as error:
            problem = problem or error
            break
        try:
            timed = replace(bench, suite_seconds=suite_seconds)
            first, bad = workers.call(run_suite, timed, with_calls=with_calls)
        except UnusableRepository as error:
            problem = problem or explain(error, source)
            said = [error.detail]
        else:
            if best is None or len(first.passed) > len(best[1].passed):
                best = bench, first, bad
            said = [*first.collect_errors.values(), *first.why.values(), *first.skips.values()]
        missing |= modules_missing(said)
        if wants_older_pytest(said):
            too_new = next(wheel.version for wheel in lock.wheels if wheel.name == "pytest")
    if best is None:
        assert problem is not None
        raise problem
    return best


def _three_runs(
    begun: FirstRun, workers: Workers, jobs: int, *, with_calls: bool
) -> tuple[list[TestReport], tuple[str, ...]]:
    """The first run and two more, and what was left out of any: a test that is not green in all is left out of everything.

    The first has the order of the files, the second one drawn by ``SHUFFLE_SEED``, the third that one backwards: of any
    two tests each comes first once, so that one which needs, or cannot bear, another before it is always found.
    """
    bench, first, bad = begun
    _refuse_red(first, first.passed, "green")
    bench = replace(bench, left_out=tuple(sorted(bad)))
    notes_again = with_calls and first.called is None  # its time ran out
    with ThreadPoolExecutor(min(2, jobs), thread_name_prefix="tasks-baseline") as pool:
        forwards = pool.submit(workers.call, run_suite, bench, 1, with_calls=notes_again)
        backwards = pool.submit(workers.call, run_suite, bench, 2)
    (second, more), (third, most) = forwards.result(), backwards.result()
    runs = [first, second, third]
    green = frozenset.intersection(*(run.passed for run in runs))
    _refuse_red(first, green, "green in all of three runs")
    return runs, tuple(sorted({*bad, *more, *most}))


def _refuse_red(first: TestReport, green: frozenset[str], what: str) -> None:
    """Refuse a repository most of whose tests say nothing."""
    num_run = sum(outcome != "skipped" for outcome in first.outcomes.values())
    if not green or len(green) < MIN_GREEN_SHARE * num_run:
        reason = _first_reason(first, green)
        told = f"{len(green)} of {num_run} tests are {what}" + (
            f"; the first says: {reason}" if reason else ""
        )
        raise UnusableRepository("red-baseline", told)


def _first_reason(first: TestReport, passed: frozenset[str]) -> str:
    """Why the first file cannot be collected, or the first of the other tests fails or is skipped, as ``PLACE: TEXT``."""
    said = {**first.collect_errors, **{test: why for test, why in first.why.items() if test not in passed}}
    texts = (said or first.skips).items()
    return next((f"{place}: {text.removeprefix('E ').strip()}"[:300] for place, text in texts), "")


def unused_tests(record: RepositoryRecord) -> dict[str, Any]:
    """The tests of a repository by what became of them.

    ``used`` are green in every run, ``flaky`` in some, ``never_green`` are the others; ``broken_files`` could not be
    collected; ``left_out`` are named: they end a run of the whole suite, or were not reached in its time.
    """
    return {
        "collected": record.num_collected,
        "used": len(record.green),
        "flaky": len(record.flaky),
        "never_green": record.num_collected - len(record.green) - len(record.flaky),
        "broken_files": len(record.broken_files),
        "left_out": list(record.left_out),
    }
