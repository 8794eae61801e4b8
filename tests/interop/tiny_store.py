"""A store of two real tasks for the faces, and what a policy does with them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.errors import SandboxFailure
from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore

if TYPE_CHECKING:
    import pytest

PROJECT = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"
NUMBERS = "tinymath/numbers.py"
PINS = (f"{NUMBERS}::clamp", f"{NUMBERS}::sign")
Call = tuple[str, dict[str, Any]]


def build_store(folder: Path) -> TaskStore:
    build_tasks([str(PROJECT)], folder, symbols={str(PROJECT): PINS})
    return TaskStore.open(folder)


def task_of(store: TaskStore, symbol: str) -> Task:
    return next(task for task in store.tasks() if task.symbol == symbol)


def golden_file(store: TaskStore, task: Task) -> str:
    return store.files(task, "golden")[NUMBERS].decode()


def with_body(store: TaskStore, task: Task, body: str) -> str:
    """The file with this in the place of the deleted body."""
    broken = store.files(task, "rollout")[NUMBERS].decode()
    return f"{broken[: task.hole.start]}\n    {body}{broken[task.hole.end :]}"


def graded_by_us(store: TaskStore, task: Task, content: str) -> float:
    """What our grader alone says of a tree whose file is this."""
    grader = Grader(store)
    try:
        score = grader.grade_tree(task, {**store.files(task, "rollout"), NUMBERS: content.encode()})
        assert score is not None
        return score.pass_share
    finally:
        grader.close()


def write(content: str) -> Call:
    return "write_file", {"path": NUMBERS, "content": content}


PLANT: Call = ("bash", {"command": "echo 'def leave(): import os; os._exit(0)' >> tinymath/__init__.py"})
"""Code that ends the process, which no test calls: nobody who works writes that."""


def wire_calls(*calls: Call | tuple[str, str]) -> list[dict[str, Any]]:
    """Calls as a server of chat completions sends them; arguments that are a text stay as they are."""
    return [
        {
            "id": f"call-{number}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": written if isinstance(written, str) else json.dumps(written),
            },
        }
        for number, (name, written) in enumerate(calls)
    ]


def attempt_folders() -> set[Path]:
    return set(process_folder().glob("attempt-*"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """No sandbox outlives what runs inside, but for a command whose caller was cancelled: until that has ended."""
    before = attempt_folders()
    yield
    for _ in range(12_000):
        if attempt_folders() == before:
            return
        time.sleep(0.01)
    raise AssertionError(f"left behind: {attempt_folders() - before}")


def break_sandboxes(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """From now on the sandbox breaks where an attempt opens (``open``), in a ``call``, or where it is graded (``grade``)."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise SandboxFailure("CR0302", "the jail broke.")

    target = {
        "open": "composer_replication.rollouts.environment.feature_deletion_env.open_sandbox",
        "call": "composer_replication.rollouts.tools.toolbox.Toolbox.call",
        "grade": "composer_replication.rollouts.grading.Grader.grade_once",
    }[place]
    monkeypatch.setattr(target, fail)
