"""A truth stronger than the reward for each task: recorded behaviour, and how strong all of it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.tasks.attach_strength import attach_strength
from composer_replication.tasks.attach_twins import attach_twins
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.workers.workers import Workers

NO_TRUTH = "no test function can be hidden, and the behaviour cannot be recorded"

Each = Callable[[Callable[[Any], Any], Collection[Any], str], Iterator[Any]]
"""Runs a function over items, several at a time, and says what is being done."""


@dataclass(frozen=True, slots=True)
class ValidTask:
    """A task of the store that passed the gates, and what it was made of."""

    task_id: str
    repository: PreparedRepository
    deletion: Deletion


def add_truth(
    store: TaskStore, tasks: Sequence[ValidTask], seed: int, each: Each, workers: Workers
) -> frozenset[str]:
    """Record what deleted functions do, and measure how strong the tests of each task are.

    Returns:
        The ids of the tasks that have no truth: neither hidden tests nor recorded behaviour.
        They are taken out of the store.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    rows: dict[str, list[ValidTask]] = {}
    for task in tasks:
        rows.setdefault(task.repository.slug, []).append(task)

    def record(own: list[ValidTask]) -> None:
        attach_twins(store, own[0].repository, [(task.task_id, task.deletion) for task in own], seed, workers)

    def measure(task: ValidTask) -> None:
        attach_strength(store, task.task_id, task.deletion, task.repository.bench, seed, workers=workers)

    list(each(record, rows.values(), "twins of repositories"))
    blind = frozenset(task.task_id for task in tasks if not store.get(task.task_id).has_hidden_tests)
    for task_id in blind:
        store.drop_task(task_id)
    list(each(measure, [task for task in tasks if task.task_id not in blind], "strength of tasks"))
    return blind
