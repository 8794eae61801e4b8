"""TRL's ``environment_factory``: ``reset(**row)``, the tools as public methods, ``get_reward()``.

TRL takes every public function of the class for a tool and makes its schema of signature and docstring, so the class
has no other ones: it is closed by ``get_reward``, by the next ``reset``, or when it is forgotten.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import ToolCall
from composer_replication.rollouts.environment.feature_deletion_env import BROKEN, FeatureDeletionEnv, begin
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.toolbox import ACTIONS


class TrlFeatureDeletion:
    """One environment as ``GRPOTrainer`` drives it; see ``environment_factory``.

    A wrong call is answered by a text that says what was wrong, and counted. A tool that does not exist is answered
    by TRL itself, before we hear of it.
    """

    def __init__(self, environment: FeatureDeletionEnv) -> None:
        self._environment = environment
        self._is_broken = False

    def reset(self, **row: Any) -> str:
        """Begin an attempt at the task of a data-set row; what is to be done, for the end of the prompt.

        Where no sandbox opens, the attempt has no reward, and training goes on. A row without a task is refused (CR0412).
        """
        task_id = row.get("task_id")
        if not isinstance(task_id, str) or not task_id:
            raise UsageError(
                "CR0412",
                f"a row of the data set names no task: its columns are {', '.join(sorted(row)) or 'none'}.",
                where="task_id",
                fix="give the data set a column task_id with the ids of tasks of the store.",
            )
        try:
            message, self._is_broken = begin(self._environment, task_id), False
        except SandboxFailure:
            message, self._is_broken = BROKEN, True
        return message

    def get_reward(self) -> float | None:
        """What the attempt pays; None where a sandbox failed. Ends the attempt.

        A rollout for which every reward function says None is left out of its group's mean by TRL and has the advantage
        0. Beside other reward functions None adds nothing, and what those pay is paid.
        """
        if self._is_broken:
            return None
        try:
            judgement = self._environment.finish()
            return None if judgement is None else float(judgement.reward)
        finally:
            self._environment.close()


def _method(tool: Callable[..., Any]) -> Callable[..., str]:
    """A tool as a method that takes arguments by name alone, as TRL gives them, and has the tool's signature and text."""

    @functools.wraps(tool)
    def use(self: TrlFeatureDeletion, **arguments: Any) -> str:
        if self._is_broken:
            return BROKEN
        call = ToolCall(tool.__name__, json.dumps(arguments, default=repr))
        try:
            return self._environment.call(call).text
        except SandboxFailure:  # the environment remembers it
            return BROKEN

    use.__annotations__ = {**tool.__annotations__, "return": "str"}
    del use.__annotations__["box"]
    return use


for _name, _tool in ACTIONS.items():
    setattr(TrlFeatureDeletion, _name, _method(_tool))


def environment_factory(grader: Grader, **options: Any) -> Callable[[], TrlFeatureDeletion]:
    """What ``GRPOTrainer(environment_factory=...)`` takes. Its data set has the columns prompt and task_id.

    ``options`` are those of ``FeatureDeletionEnv``. Nothing is opened before ``reset``: TRL makes one instance only to
    look at it.
    """
    return lambda: TrlFeatureDeletion(FeatureDeletionEnv(grader, **options))
