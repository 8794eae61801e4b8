"""A store of a few real tasks, built and proven in the sandbox, and a grader over it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore

sys.path.insert(0, str(Path(__file__).parent))  # the modules of recorded rollouts and of chat templates

PINS = ("tinymath/numbers.py::clamp", "tinymath/numbers.py::sign", "tinymath/text.py::initials")


@pytest.fixture(scope="session")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    return TaskStore.open(build_tiny(tmp_path_factory.mktemp("rollout-store") / "tasks", PINS))


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
