"""A control for hints: what a hint does that speaks of another task.

Whatever such a hint teaches comes from there being a hint, not from what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from composer_replication.errors import UsageError
from composer_replication.records import Hint, Task
from composer_replication.rollouts.hints.hint_context import HintContext
from composer_replication.rollouts.hints.layers import MAX_CHARACTERS, PREFIX, clamp, clean_text
from composer_replication.rollouts.hints.task_observer import TaskObserver
from composer_replication.rollouts.hints.templates import MAX_TESTS, told_tests


class HintsOfOtherTasks:
    """Call it with a hint: it gives one of about the same length about another task in its place.

    The texts are what the template of failing tests says of a task's visible tests, of one test or of two neighbours. They
    come from tasks of other repositories, or where all tasks are of one repository from its other tasks. Of those the
    nearest in length is taken, in characters, the first by task and text where two are as near: no number is drawn and
    nothing is remembered, so a resumed run hands out the same.

    Args:
        observer: knows the tests.
        tasks: those to tell of: never held-out ones.

    Raises:
        UsageError: fewer than two tasks (CR0760).
    """

    def __init__(self, observer: TaskObserver, tasks: Sequence[Task]) -> None:
        self._repositories = {task.task_id: task.repository for task in tasks}
        if len(self._repositories) < 2:
            raise no_other_tasks("there are fewer than two tasks to train on", "train on more tasks")
        self._observer = observer

    def __call__(self, context: HintContext, hint: Hint) -> Hint | None:
        """``hint`` with another text; None where no text may be shown beside this task."""
        task_id = context.observed.rollout.task_id
        ranked = sorted(self._texts_for(task_id), key=lambda text: abs(len(text) - len(hint.text)))
        for text in ranked:
            if text != hint.text and not context.observed.is_leak(text):
                return replace(hint, text=text, source="other-task")
        return None

    def _texts_for(self, task_id: str) -> list[str]:
        own = self._repositories.get(task_id)
        foreign = [name for name, repository in self._repositories.items() if repository != own]
        others = foreign or [name for name in self._repositories if name != task_id]
        return [text for name in sorted(others) for text in self._texts[name]]

    @cached_property
    def _texts(self) -> dict[str, list[str]]:
        """By task; what would tell its own secret is left out, though it is shown beside other tasks only."""
        return {name: self._texts_about(name) for name in self._repositories}

    def _texts_about(self, task_id: str) -> list[str]:
        known = self._observer.known(task_id)
        tests = known.visible_tests()
        told = {
            told_tests(tests[start : start + count])
            for count in range(1, MAX_TESTS + 1)
            for start in range(len(tests) - count + 1)
        }
        cut = {clamp(clean_text(text), MAX_CHARACTERS) for text in told}
        return [f"{PREFIX}{text}" for text in sorted(cut) if not known.is_leak(text)]


def no_other_tasks(problem: str, fix: str) -> UsageError:
    """``from_other_tasks`` where it cannot be (CR0760)."""
    return UsageError(
        "CR0760",
        f"hints of other tasks were asked for, and {problem}.",
        where="hints.writing.from_other_tasks",
        fix=f"{fix}, or take the key out.",
    )
