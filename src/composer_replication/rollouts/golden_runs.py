"""What a task's original code does in this sandbox; where it does not pass, nothing can be said of an answer.

A task was proven by a run of its original code in one sandbox (``TaskStore.proved_by``). On another machine, or in
another kind of jail, the same code may fail: no network of its own, another Python, another kernel. An answer that fails
there is no wrong answer, so its grading is a failure of the sandbox.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar

from composer_replication.errors import SandboxFailure
from composer_replication.tasks.proving_sandbox import sandbox_in_force
from composer_replication.tasks.store import TaskStore

logger = logging.getLogger(__name__)

Found = TypeVar("Found")


class GoldenFails(Exception):
    """The original code does not pass; the text says how, and names no hidden test."""


class GoldenRuns:
    """Looks up what original code does, once for each key; safe to use from several threads.

    What fails is not kept: the machine may have been busy. It is tried again at the second, fourth, eighth, … asking, so
    that a task that cannot pass here costs little.
    """

    def __init__(self, store: TaskStore, backend: str | None) -> None:
        self._store = store
        self._backend = backend
        self._lock = Lock()
        self._turns: dict[str, Lock] = {}
        self._found: dict[str, Any] = {}
        self._failed: dict[str, tuple[int, str]] = {}

    def look_up(self, task_id: str, kind: str, look: Callable[[], Found]) -> Found:
        """What ``look`` gives, which raises ``GoldenFails`` where the original code does not pass.

        Raises:
            SandboxFailure: the original code does not pass here (CR0494), or the sandbox broke.
        """
        key = f"{task_id}/{kind}"
        with self._lock:
            turn = self._turns.setdefault(key, Lock())
        with turn:
            if key not in self._found:
                num_asked, problem = self._failed.get(key, (0, ""))
                if num_asked & (num_asked - 1) == 0:
                    try:
                        self._found[key] = look()
                    except GoldenFails as error:
                        problem = str(error)
                if key not in self._found:
                    self._failed[key] = (num_asked + 1, problem)
                    raise self._failure(task_id, problem, is_first=num_asked == 0)
            found: Found = self._found[key]
            return found

    def _failure(self, task_id: str, problem: str, *, is_first: bool) -> SandboxFailure:
        proved = " or ".join(map(str, self._store.proved_by)) or "a sandbox that it does not name"
        error = SandboxFailure(
            "CR0494",
            f"the original code of {task_id} does not pass here, in {sandbox_in_force(self._backend)}: {problem}; "
            f"it was proven in {proved}. Attempts at it are dropped.",
            where=str(self._store.root),
            fix="use the sandbox that proved it, or build the tasks again here; composer-rl tasks validate names all such tasks.",
        )
        if is_first:
            logger.warning("%s", error)
        return error
