"""A class whose hidden tests ask what the visible ones ask has no truth against a table of answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.lookup_gate import _replaceable
from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.store import TaskStore

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


def test_a_table_is_caught_by_hidden_tests_that_ask_something_else(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name, text in {
        "planted/__init__.py": SOURCE,
        "tests/test_planted.py": TESTS,
        "pyproject.toml": '[project]\nname = "planted"\nversion = "1"\n',
    }.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    summary = build_tasks(
        [str(project)],
        tmp_path / "out",
        granularities=("class",),
        removals=("body", "whole"),
        with_truth=True,
    )
    assert dict(summary.rejected) == {"lookup-passes": 2}
    store = TaskStore.open(tmp_path / "out")
    assert {task.symbol for task in store.tasks()} == {"Understood"}
    rows = [json.loads(line) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
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
