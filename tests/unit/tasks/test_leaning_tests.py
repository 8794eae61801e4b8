"""Tests that lean on hidden ones, or ask for the very words of the code: found by a build, and by ``validate`` in a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from composer_replication.tasks import gates
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.validate import validate_store

MakeProject = Callable[[Mapping[str, str]], Path]
pytestmark = pytest.mark.timeout(600)


DOUBLE = "def double(x):\n    y = x + x\n    return y\n"
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
def test_a_test_that_leans_on_hidden_ones_is_found_in_a_store(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test counts the tests of its file: it passes in the whole tree, not where some are hidden.

    The build's own gate is switched off, as in a store of a version that had none.
    """
    monkeypatch.setattr(gates, "neighbour_trials", lambda *_: [])
    source = str(make_project({"planted/__init__.py": DOUBLE, "tests/test_planted.py": LEANING}))
    out = tmp_path / "out"
    assert build_tasks([source], out).tasks == 1
    (failure,) = validate_store(out, repeat=1).failed
    assert (failure.gate, failure.detail) == (
        "leans-on-hidden",
        "1 tests, such as tests/test_planted.py::test_leans",
    )


@pytest.mark.long
def test_no_test_is_hidden_on_which_another_leans(make_project: MakeProject, tmp_path: Path) -> None:
    """Whatever is hidden, the test that counts them fails: so none is."""
    source = str(make_project({"planted/__init__.py": DOUBLE, "tests/test_planted.py": LEANING}))
    out = tmp_path / "out"
    assert build_tasks([source], out).tasks == 1
    store = TaskStore.open(out)
    (task,) = store.tasks()
    assert store.secret(task.task_id).hidden == ()
    assert len(task.tests.visible) == 4
    assert "tests/test_planted.py::test_leans" in task.tests.pass_to_pass
    assert validate_store(out, repeat=1).failed == ()
