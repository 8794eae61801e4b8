"""A store of a few real tasks, built and proven in the sandbox, and a grader over it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore

sys.path.insert(0, str(Path(__file__).parent))  # the modules of recorded rollouts and of chat templates

PROJECT = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
PINS = ("tinymath/numbers.py::clamp", "tinymath/numbers.py::sign", "tinymath/text.py::initials")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    folder = tmp_path_factory.mktemp("rollout-store") / "tasks"
    build_tasks([str(PROJECT)], folder, symbols={str(PROJECT): PINS})
    return TaskStore.open(folder)


@pytest.fixture(scope="session")
def grader(store: TaskStore) -> Iterator[Grader]:
    grader = Grader(store)
    yield grader
    grader.close()


@pytest.fixture(scope="session")
def clamp(store: TaskStore) -> Task:
    """A task with hidden tests."""
    task = next(task for task in store.tasks() if task.symbol == "clamp")
    assert task.has_hidden_tests
    return task
