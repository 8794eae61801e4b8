"""Trees in which every deleted function returns one constant, and which tests pass in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.running.bench import IDLE_SECONDS, Bench, Trial
from composer_replication.tasks.subject import GateFailed, Subject
from composer_replication.tasks.test_run import TestReport

MAX_STUB_TESTS = 40
STUBS = ("", *STUB_EXPRESSIONS)
"""What every deleted function returns; with "" the code is gone."""
Passed = Mapping[str, frozenset[str] | None]
"""The tests that pass with each constant ("": without the code); None where the run of all came to nothing."""


def some_of(tests: Sequence[str]) -> list[str]:
    """Of very many tests a part: to fail one is enough."""
    return sorted(sorted(tests, key=lambda test: sha256_of(test.encode()))[:MAX_STUB_TESTS])


def stub_trees(subject: Subject, bench: Bench) -> dict[str, dict[str, bytes]]:
    """The tree without the code ("") and with every function returning one constant."""
    original = bench.original
    trees = {"": subject.broken(original, "hidden")}
    return trees | {text: subject.stubbed(original, "hidden", text) for text in STUB_EXPRESSIONS}


def stub_trials(
    subject: Subject,
    tests: Sequence[str],
    bench: Bench,
    seconds: float | None = None,
    stop_when: Sequence[Sequence[str]] = (),
) -> list[Trial]:
    """A run of the tests in each tree of ``stub_trees``; ``seconds`` and ``stop_when`` as in ``Trial``."""
    return [
        Trial(tree, tests, seconds=seconds, stop_when=stop_when, idle_seconds=IDLE_SECONDS)
        for tree in stub_trees(subject, bench).values()
    ]


def passed_in(report: TestReport, tests: Iterable[str]) -> frozenset[str] | None:
    """The tests but for those that were run and did not pass; None: the run came to nothing, and says nothing of any."""
    return None if report.error else frozenset(tests) - (report.outcomes.keys() - report.passed)


def passed_by_stubs(
    subject: Subject, tests: Sequence[str], bench: Bench, golden: TestReport | None = None
) -> Passed:
    """Which of the tests pass without the code ("") and when every function returns one constant.

    How long they may run follows from what the code needs (``golden``, a run of these tests or more; None: they are run
    first): with a constant many a loop never ends. Those of very many that are not run are taken as passed.
    """
    chosen = some_of(tests)
    if golden is None:
        (golden,) = bench.run_all([Trial(bench.original, chosen, is_golden=True)])
    seconds = None if golden.error else bench.noticing_seconds(golden.cpu_seconds)
    reports = bench.run_all(stub_trials(subject, chosen, bench, seconds))
    return {text: passed_in(report, tests) for text, report in zip(STUBS, reports, strict=True)}


def refuse_stubs(subject: Subject, passed: Passed) -> None:
    """Refuse a deletion of which a side's tests all pass with one constant; ``passed`` is of ``passed_by_stubs``.

    Raises:
        GateFailed: broken-passes or stub-passes.
    """
    for text, tests_passed in passed.items():
        for kind, tests in subject.sides.items():
            if tests_passed is not None and tests_passed.issuperset(tests):
                raise stub_passes(text, kind)


def refuse_apart(
    subject: Subject,
    unclear: Mapping[str, Collection[str]],
    bench: Bench,
    seconds: float | None = None,
) -> None:
    """Run visible, paid and hidden tests on their own with constants with which a run of all came to nothing.

    One test that never ends, or one file that is not collected, is no reason for the others to fail. ``unclear``
    maps these constants to the tests that are known to fail with them; ``seconds`` is the processor time of a run,
    None for what the bench gives.

    Raises:
        GateFailed: broken-passes or stub-passes.
        SandboxFailure: the sandbox broke.
    """
    kinds = {kind: some_of(tests) for kind, tests in subject.sides.items()}
    apart = [
        (text, kind)
        for text, failing in unclear.items()
        for kind, tests in kinds.items()
        if not set(tests).intersection(failing)
    ]
    if not apart:
        return
    trees = stub_trees(subject, bench)
    trials = [
        Trial(
            trees[text], kinds[kind], stop_at_first_failure=True, seconds=seconds, idle_seconds=IDLE_SECONDS
        )
        for text, kind in apart
    ]
    for (text, kind), report in zip(apart, bench.run_all(trials), strict=True):
        if not report.error and report.passed.issuperset(kinds[kind]):
            raise stub_passes(text, kind)


def stub_passes(text: str, kind: str) -> GateFailed:
    """What is said of tests that pass with a constant; with "" it is the tree without the code."""
    if not text:
        return GateFailed("broken-passes", f"the {kind} tests pass without the code")
    return GateFailed("stub-passes", f"the {kind} tests pass with return {text}")
