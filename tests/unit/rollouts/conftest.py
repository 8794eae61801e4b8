"""A store of a few real tasks, built and proven in the sandbox, and a grader over it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader, GradeRequest, find_regressions
from composer_replication.tasks.store import TaskStore

sys.path.insert(0, str(Path(__file__).parent))  # the modules of recorded rollouts and of chat templates

PINS = ("tinymath/numbers.py::clamp", "tinymath/numbers.py::sign", "tinymath/text.py::initials")


@pytest.fixture(scope="session")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    return TaskStore.open(build_tiny(tmp_path_factory.mktemp("rollout-store") / "tasks", PINS))


@pytest.fixture(scope="session")
def known_golden(store: TaskStore, clamp: Task, made_once: Callable[..., Any]) -> dict[str, Any]:
    """What a grader learns of the original code of ``clamp``: the same in every process, so one of them runs it."""

    def learned() -> dict[str, Any]:
        golden = store.golden_body(clamp)
        with closing(Grader(store)) as grader:
            grader.grade_many([GradeRequest(clamp, golden), GradeRequest(clamp, golden, "hidden")])
            find_regressions(grader, clamp, store.files(clamp, "golden"))
            return grader._golden

    return made_once("golden-of-clamp", learned)


@pytest.fixture(scope="session")
def grader(store: TaskStore, known_golden: dict[str, Any]) -> Iterator[Grader]:
    with closing(Grader(store)) as grader:
        grader._golden |= known_golden
        yield grader


@pytest.fixture(scope="session")
def clamp(store: TaskStore) -> Task:
    """A task with hidden tests."""
    task = next(task for task in store.tasks() if task.symbol == "clamp")
    assert task.has_hidden_tests
    return task
