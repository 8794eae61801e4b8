"""What hints need to know of a task of a store, read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from composer_replication.records import Score, Task
from composer_replication.rollouts.hints.failing_tests import failed_tests, told_first
from composer_replication.rollouts.hints.hint_context import FailedTest
from composer_replication.tasks.instructions.writing import read_material
from composer_replication.tasks.instructions.written_instructions import read_secrets, secret_shown
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_functions import Place


@dataclass(frozen=True, slots=True)
class KnownTask:
    """A task, its first prompt, the paths of its tree and its visible tests; ``secrets`` are only asked about."""

    task: Task
    prompt: str
    tree: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    places: Mapping[str, Place]
    secrets: Any

    def failed_tests(self, score: Score | None) -> tuple[FailedTest, ...]:
        """The visible tests that failed, the most telling first."""
        return failed_tests(self.task, score, self.sources, self.places)

    def visible_tests(self) -> tuple[FailedTest, ...]:
        """All visible tests as if they had failed, in the same order."""
        return told_first(self.task, self.task.tests.shown, self.sources, self.places)

    def is_leak(self, text: str) -> bool:
        """Whether a text shows deleted code, a hidden test or a hidden value."""
        return bool(secret_shown(text, self.secrets))


class KnownTasks:
    """Hidden tests and the deleted code are looked at only to refuse a hint that shows them.

    Args:
        store: has the tasks.
        prompt_of: what a policy is told first.

    Raises (when called):
        InputError: no such task, or the store is damaged (CR0411, CR0412).
    """

    def __init__(self, store: TaskStore, prompt_of: Callable[[Task], str]) -> None:
        self.store = store
        self._prompt_of = prompt_of
        self._known: dict[str, KnownTask] = {}

    def __call__(self, task_id: str) -> KnownTask:
        if task_id not in self._known:
            store, task = self.store, self.store.get(task_id)
            places = store.repository(store.record(task_id).repository_record).places
            prompt = self._prompt_of(task)
            self._known[task_id] = KnownTask(
                task,
                prompt,
                tuple(sorted(store.files(task, "rollout"))),
                read_material(store, task).sources,
                {test: places[test] for test in task.tests.shown if test in places},
                read_secrets(store, task, prompt),
            )
        return self._known[task_id]
