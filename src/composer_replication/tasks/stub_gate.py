"""Trees in which every deleted function returns one constant, and which tests pass in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from composer_replication.tasks.gate_failed import GateFailed
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.running.bench import Bench, Trial
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.test_run import TestReport

MAX_STUB_TESTS = 40


def some_of(tests: Sequence[str]) -> list[str]:
    """Of very many tests a part: to fail one is enough."""
    return sorted(sorted(tests, key=lambda test: sha256_of(test.encode()))[:MAX_STUB_TESTS])


def stub_trees(subject: Subject, bench: Bench) -> dict[str, dict[str, bytes]]:
    """The tree without the code ("") and with every function returning one constant."""
    original = bench.original
    trees = {"": subject.broken(original, "hidden")}
    return trees | {text: subject.stubbed(original, "hidden", text) for text in STUB_EXPRESSIONS}


def stub_trials(subject: Subject, tests: Sequence[str], bench: Bench) -> list[Trial]:
    """A run of the tests in each tree of ``stub_trees``."""
    return [Trial(tree, tests) for tree in stub_trees(subject, bench).values()]


def run_stubs(subject: Subject, tests: Sequence[str], bench: Bench) -> dict[str, TestReport]:
    """What the tests do without the code ("") and when every function returns one constant."""
    reports = bench.run_all(stub_trials(subject, tests, bench))
    return dict(zip(["", *STUB_EXPRESSIONS], reports, strict=True))


def passed_in(report: TestReport) -> frozenset[str]:
    """The tests that passed; none in a run that came to nothing."""
    return frozenset() if report.error else report.passed


def passed_by_stubs(subject: Subject, tests: Sequence[str], bench: Bench) -> dict[str, frozenset[str]]:
    """Which of the tests pass with each of ``run_stubs``; those of very many that are not run are taken as passed."""
    tried = some_of(tests)
    untried = frozenset(tests).difference(tried)
    return {
        text: untried | passed_in(report).intersection(tried)
        for text, report in run_stubs(subject, tried, bench).items()
    }


def refuse_stubs(subject: Subject, passed: Mapping[str, frozenset[str]]) -> None:
    """Refuse a deletion whose visible or hidden tests all pass with one constant; ``passed`` is of ``passed_by_stubs``.

    Raises:
        GateFailed: broken-passes or stub-passes.
    """
    for text, tests_passed in passed.items():
        for kind, tests in (("visible", subject.visible), ("hidden", subject.hidden)):
            if tests and tests_passed.issuperset(tests):
                raise stub_passes(text, kind)


def stub_passes(text: str, kind: str) -> GateFailed:
    """What is said of tests that pass with a constant; with "" it is the tree without the code."""
    if not text:
        return GateFailed("broken-passes", f"the {kind} tests pass without the code")
    return GateFailed("stub-passes", f"the {kind} tests pass with return {text}")
