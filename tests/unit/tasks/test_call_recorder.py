"""Which functions of a tree are called, in a real run; the small project's calls are known by hand."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

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


def never():
    return 6


def in_thread():
    return 8


async def awaited():
    return 9
"""
TESTS = """\
import threading
import package


def test_first():
    assert package.first() == 2


def test_third():
    assert next(package.third()) == 4


def test_thread():
    thread = threading.Thread(target=package.in_thread)
    thread.start()
    thread.join()


def test_awaits():
    import asyncio
    assert asyncio.run(package.awaited()) == 9
"""
LINES = {"decorate": 1, "first": 5, "second": 10, "third": 14, "in_thread": 22, "awaited": 26}


def run(environment: Environment, tests: str, *, with_calls: bool) -> TestReport:
    files: Mapping[str, str] = {"package.py": PACKAGE, "test_it.py": tests}
    trial = Trial({name: text.encode() for name, text in files.items()}, None, 60.0, with_calls=with_calls)
    return run_alone(trial, environment)


def test_each_function_that_is_called_is_known_and_outcomes_are_those_of_a_plain_run(
    environment: Environment,
) -> None:
    plain, report = (run(environment, TESTS, with_calls=one) for one in (False, True))
    assert (report.outcomes, report.collected, report.error) == (plain.outcomes, plain.collected, "")
    assert list(map(str, plain.outcomes.values())).count("failed") == 1
    assert plain.called is None
    assert report.called is not None
    assert {line for path, line in report.called if path == "package.py"} == set(LINES.values())
    assert {(path, line) for path, line, _ in report.places.values()} <= report.called


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring cannot be taken away")
def test_where_a_test_brings_its_own_profiler_nobody_knows(environment: Environment) -> None:
    tests = "import sys\n\n\ndef test_takes_it():\n    sys.setprofile(None)\n"
    report = run(environment, tests, with_calls=True)
    assert (report.error, len(report.passed), report.called) == ("", 1, None)
