"""A class whose hidden tests ask what the visible ones ask has no truth against a table of answers."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.journal import read_journal
from composer_replication.tasks.lookup_gate import _replaceable, answered_calls
from composer_replication.tasks.planning.body_cuts import BodyCut, find_body_cuts
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.twin.twin_run import RecordedCall

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


def write_project(root: Path, source: str, tests: str) -> str:
    project = '[project]\nname = "planted"\nversion = "1"\n'
    files = {"planted/__init__.py": source, "tests/test_planted.py": tests, "pyproject.toml": project}
    return str(write_tree(root, files))


@pytest.mark.long
@pytest.mark.promise
def test_a_table_is_caught_by_hidden_tests_that_ask_something_else(tmp_path: Path) -> None:
    summary = build_tasks(
        [write_project(tmp_path / "project", SOURCE, TESTS)],
        tmp_path / "out",
        granularities=("class",),
        removals=("body", "whole"),
        with_truth=True,
    )
    assert dict(summary.rejected) == {"lookup-passes": 2}
    store = TaskStore.open(tmp_path / "out")
    assert {task.symbol for task in store.tasks()} == {"Understood"}
    rows = read_journal(tmp_path / "out" / "journal.jsonl")
    refused = {row["pin"] for row in rows if row["reason"] == "lookup-passes"}
    assert refused == {"planted/__init__.py::Learned@class/body", "planted/__init__.py::Learned@class/whole"}


@pytest.mark.parametrize(
    ("body", "gives"),
    [
        ("return 1", True),
        ("    yield x", True),
        ("self.x = 1\n    return", False),
        ("pass", False),
        ("if x:\n        return None\n    y()", True),
        ("what is this return", True),
    ],
)
def test_only_functions_that_give_a_value_back_have_a_table(body: str, gives: bool) -> None:
    text = f"def f(x, self=0, y=int):\n    {body.strip()}\n"
    cut = BodyCut("f.py", "f", 1, text.index("\n") + 1, len(text), "", text.partition("\n")[2])
    assert bool(_replaceable([cut])) is gives


REPLAYED = """
import os
import signal
import time

def slow(number):
    end = time.process_time() + 1.3
    while time.process_time() < end:
        pass
    return number

def vandal(number):
    os.kill(os.getppid(), signal.SIGKILL)
    return number

def twice(number):
    return number + number
"""


def test_a_replay_that_is_taken_down_costs_its_culprit_and_is_said(environment: Environment) -> None:
    cuts = find_body_cuts("planted.py", REPLAYED)
    call = RecordedCall(pickle.dumps(((4,), {})), ("test_planted.py::test_four",))
    bench = Bench({"planted.py": REPLAYED.encode()}, environment, None, suite_seconds=60, test_seconds=60)
    answers, problems = answered_calls(bench, [(cut, [call]) for cut in cuts])
    assert pickle.loads(answers["planted.py::twice"][0] or b"") == ("value", 8)
    assert pickle.loads(answers["planted.py::slow"][0] or b"") == ("value", 4)  # as slow a call is in a table
    assert set(problems) == {"planted.py::vandal"}
    assert "the run ended" in problems["planted.py::vandal"]
