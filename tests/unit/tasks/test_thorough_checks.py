"""``validate --thorough``: tables of answers, and PASS_TO_PASS where a rollout runs it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from composer_replication.tasks import gates, part_subject, truth, validate
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.lookup_gate import LookupFindings
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.validate import learned_by_heart, validate_store

pytestmark = pytest.mark.timeout(600)

SOURCE = """
class Learned:
    def __init__(self, degrees):
        self.degrees = degrees

    def fahrenheit(self, digits):
        value = self.degrees * 9
        value = value / 5
        return round(value + 32, digits)
"""
# All ask for the same call, so that whatever is hidden, the others tell its answer.
TESTS = """
from planted import Learned


def test_nothing():
    pass


def test_learned_one():
    assert Learned(0).fahrenheit(1) == 32


def test_learned_two():
    assert 31 < Learned(0).fahrenheit(1) < 33


def test_learned_three():
    assert Learned(0).fahrenheit(1) in (32, 33)


def test_learned_four():
    assert str(Learned(0).fahrenheit(1)) == "32.0"
"""


def project(root: Path, source: str, tests: str) -> str:
    for name, text in {
        "planted/__init__.py": source,
        "tests/test_planted.py": tests,
        "pyproject.toml": '[project]\nname = "planted"\nversion = "1"\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.mark.long
def test_a_task_that_a_table_solves_is_found_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build's own gate is switched off, as in a store of a version that had none."""
    monkeypatch.setattr(truth, "passed_by_lookup", lambda *_: LookupFindings())
    source = project(tmp_path / "project", SOURCE, TESTS)
    out = tmp_path / "out"
    build_tasks([source], out, granularities=("class",), with_truth=True)
    store = TaskStore.open(out)
    assert {task.symbol for task in store.tasks()} == {"Learned"}
    found = learned_by_heart(store, store.task_ids())
    assert ({store.get(task_id).symbol for task_id in found.passed}, found.untried) == ({"Learned"}, {})
    assert validate_store(out, repeat=1).failed == ()
    (failure,) = validate_store(out, repeat=1, thorough=True).failed
    assert (store.get(failure.task_id).symbol, failure.gate) == ("Learned", "lookup-passes")


LEANING = """
import sys

from planted import double


def test_double_one():
    assert double(1) == 2


def test_double_two():
    assert double(2) == 4


def test_double_three():
    assert double(3) == 6


def test_double_four():
    assert double(4) == 8


def test_leans():
    names = dir(sys.modules[__name__])
    assert sum(name.startswith("test_double_") for name in names) == 4


def test_stands():
    assert True
"""


@pytest.mark.long
def test_pass_to_pass_is_run_in_the_tree_of_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test counts the tests of its file: it passes in the whole tree, not where some are hidden.

    The build's own gate is switched off, as in a store of a version that had none; then that of the validation.
    """
    monkeypatch.setattr(gates, "neighbour_trials", lambda *_: [])
    source = project(tmp_path / "project", "def double(x):\n    y = x + x\n    return y\n", LEANING)
    out = tmp_path / "out"
    assert build_tasks([source], out).tasks == 1
    (failure,) = validate_store(out, repeat=1).failed
    assert (failure.gate, failure.detail) == (
        "leans-on-hidden",
        "1 tests, such as tests/test_planted.py::test_leans",
    )
    monkeypatch.setattr(validate, "neighbour_trials", lambda *_: [])
    (failure,) = validate_store(out, repeat=1, thorough=True).failed
    assert failure.gate == "other-tests-fail"
    assert "tests/test_planted.py::test_leans" in failure.detail


WORDED = """
import pytest

from planted import double


def test_double():
    assert double(2) == 4


def test_double_again():
    assert double(5) == 10


def test_negative():
    with pytest.raises(ValueError, match="half steps downwards stay forbidden"):
        double(-1)


def test_very_negative():
    with pytest.raises(ValueError, match="numbers far below nothing are refused"):
        double(-1000)


def test_nothing():
    assert True
"""


@pytest.mark.long
def test_a_hidden_test_that_wants_the_very_words_of_the_code_is_found_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build's own rule is switched off, as in a store of a version that had none."""
    monkeypatch.setattr(part_subject, "deleted_texts", lambda *_: frozenset())
    code = (
        "def double(x):\n    if x < -100:\n        raise ValueError('numbers far below nothing are refused')\n"
        "    if x < 0:\n        raise ValueError('half steps downwards stay forbidden')\n    return x + x\n"
    )
    out = tmp_path / "out"
    assert build_tasks([project(tmp_path / "project", code, WORDED)], out, hidden_share=0.7).tasks == 1
    (failure,) = validate_store(out, repeat=1).failed
    assert failure.gate == "unfair-hidden"


@pytest.mark.long
def test_no_test_is_hidden_on_which_another_leans(tmp_path: Path) -> None:
    """Whatever is hidden, the test that counts them fails: so none is."""
    source = project(tmp_path / "project", "def double(x):\n    y = x + x\n    return y\n", LEANING)
    out = tmp_path / "out"
    assert build_tasks([source], out).tasks == 1
    store = TaskStore.open(out)
    (task,) = store.tasks()
    assert store.secret(task.task_id).hidden == ()
    assert len(task.tests.visible) == 4
    assert "tests/test_planted.py::test_leans" in task.tests.pass_to_pass
    assert validate_store(out, repeat=1, thorough=True).failed == ()


@pytest.mark.parametrize("num_tasks", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_good_store_passes(tiny_store: TaskStore, tmp_path: Path, num_tasks: int) -> None:
    shutil.copytree(tiny_store.root, tmp_path / "copy")
    store = TaskStore.open(tmp_path / "copy")
    for task_id in store.task_ids()[num_tasks:]:
        store.drop_task(task_id)
    summary: Any = validate_store(store.root, repeat=1, thorough=True)
    assert (summary.tasks, summary.passed, summary.failed) == (num_tasks, num_tasks, ())
