"""Bring one repository to the start line: files, locked environment, a suite that is green in any order."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError
from composer_replication.records import Outcome
from composer_replication.run_folder import read_json, write_json
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.environment import (
    Environment,
    EnvironmentLock,
    UnusableRepository,
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

TOO_SLOW = "too-slow"
TOO_LARGE = "too-large"
MAX_SUITE_SECONDS = 86_400.0
_MORE_TIME = 3
_WITHOUT = "no flag raises it: give the folder or a copy of it without the tests that need more"


def cut_off(report: TestReport, suite_seconds: float, where: str = "") -> UnusableRepository:
    """The refusal of a suite whose run as a whole failed: at a limit, or else it is red. Names the test that was running.

    ``report`` is a run with an error, ``suite_seconds`` how long it had; ``where`` is said in front.
    """
    if report.ended is Ended.TIME and report.broke:
        reason, said = TOO_SLOW, f"the suite was ended: {report.broke}"
    elif report.ended is Ended.TIME:
        more = min(MAX_SUITE_SECONDS, _MORE_TIME * suite_seconds)
        said = f"the suite ran longer than {suite_seconds:g} s; --suite-seconds {more:g} gives it more time"
        reason = TOO_SLOW
    elif report.ended is Ended.LIMIT:
        reason, said = TOO_LARGE, f"{report.error}; {_WITHOUT}"
    else:
        reason, said = "red-baseline", report.error
    last = f"; {report.running} was running" if report.running else ""
    return UnusableRepository(reason, f"{where}{said}{last}")


# --- Runs of the whole suite before anything is deleted: one bad test does not end them for the others.
# A test that hangs, ends or doubles the process, or whose file does so when it is imported, is left out and named, and the suite
# is run again without it. What is not reached in the time of a suite is left out, too.

MAX_BAD_TESTS = 10


def run_suite(
    bench: Bench,
    *,
    with_calls: bool = False,
    shuffle_seed: int | None = None,
    backwards: bool = False,
    seconds: float | None = None,
) -> tuple[TestReport, dict[str, str]]:
    """The whole suite, but for what the bench leaves out: its report, and what was left out of it, by test or file, and why.

    ``with_calls`` also notes which functions are called (nothing where time ran out), ``shuffle_seed`` draws another
    order, ``backwards`` is that from its end; ``seconds`` are for all of it by the clock (None: as the bench says).
    UnusableRepository: ``red-baseline``, ``too-slow`` or ``too-large``.
    """
    limit = bench.suite_seconds if seconds is None else seconds
    bad: dict[str, str] = {}
    while True:
        trial = Trial(
            bench.original, None, limit, with_calls=with_calls,
            shuffle_seed=shuffle_seed, backwards=backwards, left_out=sorted({*bench.left_out, *bad}),
        )  # fmt: skip
        report = run_alone(trial, bench.environment, backend=bench.backend)
        if not report.error:
            break
        has_no_time = len(bad) == MAX_BAD_TESTS or (report.ended is Ended.TIME and not report.broke)
        if has_no_time and report.done:
            # What there was no time for says nothing against the suite.
            late = [test for test in report.collected if test not in report.done]
            why = f": {report.running} ends the run, as ten others do" if report.broke else f" in {limit:g} s"
            bad |= dict.fromkeys(late, f"not reached{why}")
            outcomes = {**report.done, **dict.fromkeys(late, Outcome.SKIPPED)}
            report = replace(report, outcomes=outcomes, error="")
            break
        is_named = report.running and report.broke and report.running not in bad
        if not is_named or report.ended is Ended.LIMIT or len(bad) == MAX_BAD_TESTS:
            raise cut_off(report, limit, "" if shuffle_seed is None else "in another order, ")
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
"""Draws the order of the second baseline run. Fixed: a store's tests must not hang on a build's seed."""


@dataclass(frozen=True, slots=True)
class PreparedRepository:
    """A repository whose candidates can be judged."""

    slug: str
    record: RepositoryRecord
    bench: Bench
    deletions: tuple[Deletion, ...]

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
    with_calls: bool,
    jobs: int = 1,
    sizes: Collection[tuple[str, str]] = (("function", "body"),),
    suite_seconds: float = SUITE_SECONDS,
) -> PreparedRepository:
    """Lock, install, run the suite three times, and keep all of it in the store.

    What an earlier build of the same bytes in the same time kept is used again, unless an earlier version kept it that did
    not look for flaky tests. ``workers`` run the suite, ``jobs`` at a time. ``with_calls`` also notes which functions are called;
    ``sizes`` are the (granularity, removal) pairs to plan,
    ``suite_seconds`` are how long by the clock a whole suite may run.
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
    kept = store.repository(slug) if store.has_record(f"repositories/{slug}.json") else None
    if (
        kept is not None
        and replace(kept, **asked) == kept
        and kept.flaky is not None
        and (kept.called is not None or not with_calls)
    ):
        record, environment = kept, store.environment_of(kept.environment)
        bench = make_bench(source.files, environment, store.backend, suite_seconds)
    else:
        begun = _with_what_is_missing(
            source, workers, store.backend, with_calls=with_calls, suite_seconds=suite_seconds
        )
        bench = begun.bench
        try:
            runs, left_out = _three_runs(begun, workers, with_calls=with_calls, jobs=jobs)
        except UnusableRepository as error:
            raise explain(error, source) from error
        first, green = runs[0], frozenset.intersection(*(run.passed for run in runs))
        record = RepositoryRecord(
            repository=source.repository,
            environment=bench.environment.fingerprint,
            places={test: first.places[test] for test in sorted(green)},
            num_collected=len(first.collected),
            broken_files=tuple(sorted(set(first.collect_errors) - set(begun.bad))),
            called=next((run.called for run in runs if run.called), frozenset() if with_calls else None),
            flaky=tuple(sorted(frozenset.union(*(run.passed for run in runs)) - green)),
            left_out=left_out,
            **asked,
        )
        store.put_lock(begun.lock)
        for data in source.files.values():
            store.put_blob(data)
        store.put_repository(slug, record)
        note_unused(store.root, slug, runs, source.left_out)
    bench = replace(bench, left_out=record.left_out)
    return PreparedRepository(slug, record, bench, find_deletions(source.files, sizes))


def make_bench(
    files: Mapping[str, bytes],
    environment: Environment,
    backend: str | None,
    suite_seconds: float = SUITE_SECONDS,
    left_out: tuple[str, ...] = (),
) -> Bench:
    """A bench with the usual time limits: nothing here waits longer than a baseline may."""
    return Bench(files, environment, backend, RUN_FACTOR * suite_seconds, TEST_SECONDS, left_out)


@dataclass(frozen=True, slots=True)
class _FirstRun:
    """An environment, the first run of the suite there, and what was left out of it and why."""

    lock: EnvironmentLock
    bench: Bench
    report: TestReport
    bad: Mapping[str, str]


def _with_what_is_missing(
    source: RepositorySource, workers: Workers, backend: str | None, *, with_calls: bool, suite_seconds: float
) -> _FirstRun:
    """The environment in which most tests are green, with the first run there.

    What the run before missed is added where the repository declares it; the runner is an earlier one where the tests
    show that they were written for it.
    """
    best: _FirstRun | None = None
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
            first, bad = workers.call(run_suite, bench, with_calls=with_calls, seconds=suite_seconds)
        except UnusableRepository as error:
            problem = problem or explain(error, source)
            said = [error.detail]
        else:
            if best is None or len(first.passed) > len(best.report.passed):
                best = _FirstRun(lock, bench, first, bad)
            said = [*first.collect_errors.values(), *first.why.values(), *first.skips.values()]
        missing |= modules_missing(said)
        if wants_older_pytest(said):
            too_new = next(wheel.version for wheel in lock.wheels if wheel.name == "pytest")
    if best is None:
        assert problem is not None
        raise problem
    return best


def _three_runs(
    begun: _FirstRun, workers: Workers, *, with_calls: bool, jobs: int
) -> tuple[list[TestReport], tuple[str, ...]]:
    """The first run and two more, and what was left out of any: a test that is not green in all is left out of everything.

    The first has the order of the files, the second one drawn by ``SHUFFLE_SEED``, the third that one backwards: of any
    two tests each comes first once, so that one which needs, or cannot bear, another before it is always found.
    """
    first = begun.report
    _refuse_red(first, first.passed, "green")
    bench = replace(begun.bench, left_out=tuple(sorted(begun.bad)))
    is_to_note = with_calls and first.called is None  # its time ran out

    def again(**how: bool) -> tuple[TestReport, dict[str, str]]:
        return workers.call(run_suite, bench, shuffle_seed=SHUFFLE_SEED, **how)

    with ThreadPoolExecutor(min(2, jobs), thread_name_prefix="tasks-baseline") as pool:
        forwards = pool.submit(again, with_calls=is_to_note)
        backwards = pool.submit(again, backwards=True)
    (second, more), (third, most) = forwards.result(), backwards.result()
    runs = [first, second, third]
    green = frozenset.intersection(*(run.passed for run in runs))
    _refuse_red(first, green, "green in all of three runs")
    return runs, tuple(sorted({*begun.bad, *more, *most}))


def _refuse_red(first: TestReport, green: frozenset[str], what: str) -> None:
    """Refuse a repository most of whose tests say nothing."""
    num_run = sum(outcome != "skipped" for outcome in first.outcomes.values())
    if not green or len(green) < MIN_GREEN_SHARE * num_run:
        none = f"all {len(first.outcomes)} tests are skipped" if first.outcomes else "no test is collected"
        count = f"{len(green)} of {num_run} tests are {what}" if num_run else none
        said = {**first.collect_errors, **first.why} or first.skips
        texts = [f"{place}: {text}" for place, text in said.items()]
        reason = f"; the first says: {texts[0][:300]}" if texts else ""
        raise UnusableRepository("red-baseline", f"{count}{reason}")


# --- Which tests are used, and why the others are not: baselines/<slug>.json beside the tasks, for a person to read.
# What a test says when it fails may hold an address or a time, so manifest and fingerprint do not know of it.

_REASON_CHARACTERS = 300
_NUM_NAMED = 20
_PYTEST_MARK = re.compile(r"^E(?=\s)")
"""Before the lines of an error."""


def _note_of(store_root: Path, slug: str) -> Path:
    return store_root / "baselines" / f"{slug}.json"


def note_unused(store_root: Path, slug: str, runs: Sequence[TestReport], left_out: Sequence[str]) -> None:
    """Keep what the baseline runs say of the tests that are not used; the first run has their reasons."""
    first = runs[0]
    passed = frozenset[str]().union(*(run.passed for run in runs))
    silent = {test for test, outcome in first.outcomes.items() if outcome == "skipped"} - first.why.keys()
    red = [test for test in first.outcomes if test not in passed | silent]
    said = {**first.collect_errors, **{test: first.why.get(test, "") for test in red}}
    texts = (f"{place}: {_PYTEST_MARK.sub('', text).strip()}" for place, text in said.items())
    note = {
        "never_green": len(red),
        "first_reason": next(texts, "").removesuffix(": ")[:_REASON_CHARACTERS],
        "left_out": list(left_out[:_NUM_NAMED]),
    }
    write_json(_note_of(store_root, slug), note)


def read_unused(store_root: Path, slug: str, record: RepositoryRecord) -> dict[str, Any]:
    """The tests of a repository by what became of them; without reasons where none are kept.

    ``used`` are green in every run, ``flaky`` in some; ``never_green`` are the others but for skipped ones (None: nobody
    noted them). ``broken_files`` could not be collected; ``first_reason`` is ``PLACE: TEXT`` of the first of these two.
    ``left_out`` are files that are not in the tree although a test might miss them.
    """
    kept: dict[str, Any] = {}
    with suppress(InputError):  # it explains and decides nothing: a reader without it goes on
        kept = read_json(_note_of(store_root, slug))
    return {
        "collected": record.num_collected,
        "used": len(record.green),
        "flaky": len(record.flaky or ()),
        "never_green": kept.get("never_green"),
        "broken_files": len(record.broken_files),
        "first_reason": kept.get("first_reason", ""),
        "left_out": kept.get("left_out", []),
    }
