"""A class whose hidden tests ask what the visible ones ask has no truth against a table of answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.records import TestSplit
from composer_replication.tasks import truth
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.build_state import read_journal
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.planning.body_cuts import BodyCut, find_body_cuts
from composer_replication.tasks.planning.edits import Changes
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.twin.twin_run import RecordedCalls, record_calls

pytestmark = pytest.mark.timeout(600)

SOURCE = """
class Learned:
    def __init__(self, degrees):
        self.degrees = degrees

    def fahrenheit(self, digits):
        value = self.degrees * 9
        value = value / 5
        return round(value + 32, digits)

class Understood:
    def __init__(self, degrees):
        self.degrees = degrees

    def kelvin(self, digits):
        value = self.degrees
        value = value + 273.15
        return round(value, digits)
"""
TESTS = """
from planted import Learned, Understood

def test_learned_one():
    assert Learned(0).fahrenheit(1) == 32

def test_learned_two():
    assert 31 < Learned(0).fahrenheit(1) < 33

def test_learned_three():
    assert Learned(0).fahrenheit(1) in (32, 33)

def test_learned_four():
    assert str(Learned(0).fahrenheit(1)) == "32.0"

def test_understood_one():
    assert Understood(0).kelvin(1) == 273.1

def test_understood_two():
    assert Understood(1).kelvin(1) == 274.1

def test_understood_three():
    assert Understood(2).kelvin(2) == 275.15

def test_understood_four():
    assert Understood(-3).kelvin(2) == 270.15
"""


@pytest.mark.long
@pytest.mark.promise
def test_a_table_is_caught_by_hidden_tests_that_ask_something_else(tmp_path: Path) -> None:
    project = '[project]\nname = "planted"\nversion = "1"\n'
    files = {"planted/__init__.py": SOURCE, "tests/test_planted.py": TESTS, "pyproject.toml": project}
    source = str(write_tree(tmp_path / "project", files))
    refused = [f"planted/__init__.py::Learned@class/{way}" for way in ("body", "whole")]
    pins = {source: [*refused, "planted/__init__.py::Understood@class/whole"]}
    summary = build_tasks([source], tmp_path / "out", symbols=pins, with_truth=True)
    assert dict(summary.rejected) == {"lookup-passes": 2}
    assert {task.symbol for task in TaskStore.open(tmp_path / "out").tasks()} == {"Understood"}
    rows = read_journal(tmp_path / "out" / "journal.jsonl")
    assert {row["pin"] for row in rows if row["reason"] == "lookup-passes"} == set(refused)


@pytest.mark.parametrize(
    ("body", "gives"),
    [
        ("return 1", True),
        ("    yield x", True),
        ("self.x = 1\n    return", False),
        ("pass", False),
        ("if x:\n        return None\n    y()", True),
        ("# return nothing", False),
        ("return(\n        1\n    )", True),
    ],
)
def test_only_functions_that_give_a_value_back_have_a_table(body: str, gives: bool) -> None:
    assert bool(truth._GIVES_A_VALUE.search(f"\n    {body.strip()}\n")) is gives


LONG, SHORT = (
    BodyCut("f.py", name, line, 0, 9, "", "\n    x = 1\n" * num_lines + "\n    return x\n")
    for name, line, num_lines in [("long", 1, 3), ("short", 9, 1)]
)
SEEN = {b"1": frozenset({"seen"})}
BOTH = {b"2": frozenset({"seen", "held"})}
NEW = {b"3": frozenset({"held"})}
OTHER = {b"4": frozenset({"a test that is neither"})}


@pytest.mark.parametrize(
    ("long", "short", "passes"),
    [
        (RecordedCalls(SEEN | BOTH), None, True),
        (RecordedCalls(SEEN | OTHER), None, False),  # whatever the hidden tests call, nobody saw it
        (RecordedCalls(SEEN | BOTH | NEW), None, False),
        (RecordedCalls(SEEN | BOTH, frozenset({"held"})), None, False),  # a call that could not be kept
        (RecordedCalls(SEEN | BOTH, frozenset({"seen"})), None, True),
        (RecordedCalls(SEEN), RecordedCalls(BOTH | NEW), False),
        (RecordedCalls(SEEN), RecordedCalls(NEW), True),  # no visible test calls it: it stays as it is
        (None, RecordedCalls(SEEN | BOTH), False),  # a table for two of six lines is no answer
        (RecordedCalls(NEW), RecordedCalls(SEEN), False),
        (None, None, False),
    ],
)
def test_hidden_tests_must_ask_what_no_visible_test_asks(
    monkeypatch: pytest.MonkeyPatch, long: RecordedCalls | None, short: RecordedCalls | None, passes: bool
) -> None:
    calls = {cut.pin: own for cut, own in ((LONG, long), (SHORT, short)) if own is not None}
    monkeypatch.setattr(truth, "record_calls", lambda _bench, cuts: (calls if len(cuts) == 2 else {}, ""))
    found = truth.passed_by_lookup(None, [trial(LONG, SHORT)])  # type: ignore[arg-type]
    assert found == ({"task": {}} if passes else {})


def trial(*cuts: BodyCut) -> truth.TrueTask:
    subject = Subject(Changes(()), (), is_whole=False, tests=TestSplit(("seen",), ("held",), ()))
    return truth.TrueTask("task", subject, cuts, {})


def test_where_recording_fails_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "record_calls", lambda *_: ({}, "it did not end"))
    silent = BodyCut("f.py", "silent", 1, 0, 9, "", "\n    x = 1\n" * 9)
    trials = [trial(LONG), replace(trial(SHORT, silent), task_id="mostly silent")]
    found = truth.passed_by_lookup(None, trials)  # type: ignore[arg-type]
    assert found == {"task": {"f.py::long": "it did not end"}}


CALLED = """
import os
def long(x):
    y = x
    return y
def mode():
    return os.environ.get("MODE")
"""
CALLS = """
import threading
from planted import long, mode

def test_kept():
    long(1)

def test_both():
    long(threading.Lock())
    long(2)

def test_too_many():
    for number in range(200):
        long(number)

def test_one_mode():
    mode()

def test_other_mode(monkeypatch):
    monkeypatch.setenv("MODE", "other")
    mode()
"""


def test_tests_whose_calls_are_not_kept_are_told(environment: Environment) -> None:
    files = {"planted.py": CALLED.encode(), "test_planted.py": CALLS.encode()}
    bench = Bench(files, environment, None, suite_seconds=60, test_seconds=60)
    calls, problem = record_calls(bench, find_body_cuts("planted.py", CALLED))
    assert problem == ""
    found, of_state = calls.values()
    assert len(found.kept) == 150
    assert found.not_kept == {"test_planted.py::test_both", "test_planted.py::test_too_many"}
    assert found.is_called_in({"test_planted.py::test_kept"})
    assert len(of_state.kept) == 1
    assert of_state.not_kept == {"test_planted.py::test_one_mode", "test_planted.py::test_other_mode"}
