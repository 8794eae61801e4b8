"""Which functions each test calls, in a real run and on disk; the small project's calls are known by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.tasks.context_recorder import UNKNOWN, decode, encode, select_tests
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.running.bench import run_alone
from composer_replication.tasks.test_run import TestReport, Trial

PACKAGE = """\
def decorate(function):
    return function


@decorate
def first():
    return second()


def second():
    return 2


def third():
    yield 3


def for_module():
    return 4


def at_module_end():
    return 5


def never():
    return 6


def for_test():
    return 7


def in_thread():
    return 8


async def awaited():
    return 9
"""
TESTS = """\
import threading
import pytest
import package


@pytest.fixture(scope='module')
def wide():
    yield package.for_module()
    package.at_module_end()


@pytest.fixture
def narrow():
    yield package.for_test()
    next(package.third())


def test_first(wide):
    assert package.first() == 2


def test_second():
    assert package.second() == 2


@pytest.mark.parametrize('x', [1, 2])
def test_narrow(narrow, x):
    assert x == 1


def test_thread():
    thread = threading.Thread(target=package.in_thread)
    thread.start()
    thread.join()


def test_imports():
    import late
    assert late.X == 2


def test_awaits():
    import asyncio
    assert asyncio.run(package.awaited()) == 9


def test_nothing():
    pass
"""
LATE = "from package import second\n\n\ndef helper():\n    return second()\n\n\nX = helper()\n"
LINES = {
    "decorate": 1, "first": 5, "second": 10, "third": 14, "for_module": 18, "at_module_end": 22, "never": 26,
    "for_test": 30, "in_thread": 34, "awaited": 38,
}  # fmt: skip
EXPECTED = {
    "": {"decorate", "for_module"},
    "test_first": {"first", "second"},
    "test_second": {"second"},
    "test_narrow[1]": {"for_test", "third"},
    "test_narrow[2]": {"for_test", "third"},
    "test_thread": {"in_thread"},
    "test_imports": {"second"},
    "test_awaits": {"awaited"},
    "test_nothing": {"at_module_end"},  # it is the last one
}
TREE = {"package.py": PACKAGE, "late.py": LATE, "test_it.py": TESTS}


def names_of(contexts: Mapping[str, frozenset[tuple[str, int]]]) -> dict[str, set[str]]:
    names = {line: name for name, line in LINES.items()}
    return {
        test.rpartition("::")[2]: {names[line] for path, line in called if path == "package.py"}
        for test, called in contexts.items()
    }


@pytest.fixture
def run(environment: Environment):
    def run_files(files: Mapping[str, str], **options: object) -> TestReport:
        return run_alone(
            Trial({name: text.encode() for name, text in files.items()}, None, 60.0, **options), environment
        )

    return run_files


def test_each_test_has_the_functions_that_it_calls_and_the_outcome_of_a_plain_run(run) -> None:
    plain, report = run(TREE), run(TREE, with_contexts=True)
    assert (report.outcomes, report.collected, report.error) == (plain.outcomes, plain.collected, "")
    assert list(map(str, plain.outcomes.values())).count("failed") == 1
    assert plain.contexts == {}
    assert names_of(report.contexts) == EXPECTED
    assert set(report.contexts) == {"", *report.collected}
    # The test functions themselves are functions of the tree, too.
    for test, (path, line, _) in report.places.items():
        assert (path, line) in report.contexts[test]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring cannot be taken away")
def test_a_test_that_brings_its_own_profiler_may_have_called_anything(run) -> None:
    tests = """\
import sys
import package


def test_takes_it():
    sys.setprofile(None)
    package.never()


def test_after():
    package.first()
"""
    report = run({"package.py": PACKAGE, "test_it.py": tests}, with_contexts=True)
    assert (report.error, len(report.passed)) == ("", 2)
    assert UNKNOWN in report.contexts["test_it.py::test_takes_it"]
    assert UNKNOWN not in report.contexts["test_it.py::test_after"]
    assert select_tests(report.contexts, [("package.py", LINES["never"])]) == ("test_it.py::test_takes_it",)
    assert select_tests(report.contexts, [("package.py", LINES["second"])]) == tuple(report.collected)


# --- choosing -----------------------------------------------------------------

A, B, C, D = ("a.py", 1), ("a.py", 9), ("b.py", 1), ("c.py", 3)
CONTEXTS = {
    "": frozenset({D}),
    "t.py::one": frozenset({A}),
    "t.py::two": frozenset({A, B}),
    "t.py::none": frozenset[tuple[str, int]](),
    "t.py::lost": frozenset({UNKNOWN}),
}


@pytest.mark.parametrize(
    ("functions", "chosen"),
    [
        ([A], ["one", "two", "lost"]),
        ([B], ["two", "lost"]),
        ([B, A], ["one", "two", "lost"]),
        ([C], ["lost"]),
        ([C, D], ["one", "two", "none", "lost"]),
        ([], ["lost"]),
    ],
)
def test_selection(functions: list[tuple[str, int]], chosen: list[str]) -> None:
    assert select_tests(CONTEXTS, functions) == tuple(f"t.py::{name}" for name in chosen)


# --- on disk -----------------------------------------------------------------

FUNCTIONS = st.tuples(st.sampled_from(["a.py", "b/c.py", ""]), st.integers(0, 5))
ALL_CONTEXTS = st.dictionaries(
    st.text(min_size=1, max_size=8), st.frozensets(FUNCTIONS, max_size=6), max_size=12
).flatmap(lambda tests: st.frozensets(FUNCTIONS, max_size=4).map(lambda shared: {"": shared, **tests}))


@settings(max_examples=40)
@given(ALL_CONTEXTS)
def test_round_trip(contexts: dict[str, frozenset[tuple[str, int]]]) -> None:
    assert decode(json.loads(json.dumps(encode(contexts)))) == contexts


GOOD = encode(CONTEXTS)


@pytest.mark.parametrize(
    "change",
    [
        {"form": 2},
        {"functions": [["a.py", "one"]]},
        {"functions": [["a.py", float("inf")]]},
        {"shared": [99]},
        {"sets": [["0"]]},
        {"tests": [["x", 99]]},
        {"tests": ["xyz"]},
    ],
)
def test_a_damaged_form_is_refused(change: dict[str, object]) -> None:
    assert decode(GOOD) == CONTEXTS
    with pytest.raises(ValueError, match="the call contexts are damaged"):
        decode({**GOOD, **change})
    missing = {name: value for name, value in GOOD.items() if name not in change}
    with pytest.raises(ValueError, match="the call contexts are damaged"):
        decode(missing)
