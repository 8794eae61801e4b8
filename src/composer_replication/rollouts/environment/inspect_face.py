"""An ``inspect_ai`` task: samples of a store, our tools in our sandboxes, our grading as the scorer.

``inspect eval composer_replication/feature_deletion -T store=tasks``. The sandbox is ours and is reached through the
tools alone; the library's own sandbox tools find none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from composer_replication.errors import SandboxFailure, needs_extra
from composer_replication.records import ToolCall, ToolSpec
from composer_replication.rollouts.environment.feature_deletion_env import (
    BROKEN,
    FeatureDeletionEnv,
    first_message,
    no_attempt,
)
from composer_replication.rollouts.environment.hosted_attempt import (
    AttemptHost,
    EnvironmentLease,
    HostOptions,
)
from composer_replication.rollouts.tools.toolbox import TOOLS

with needs_extra("inspect", "the inspect task"):
    from inspect_ai import Task, task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ChatMessageTool
    from inspect_ai.scorer import Score, Target, mean, scorer, stderr
    from inspect_ai.solver import Generate, TaskState, generate, solver
    from inspect_ai.tool import Tool, ToolDef, ToolParams

T = TypeVar("T")


class _Attempts(AttemptHost):
    """Those under way, by the id that the library gives a run of a sample; why those that have no sandbox any more failed."""

    def __init__(self, options: HostOptions) -> None:
        super().__init__(options)
        self.failures: dict[str, str] = {}
        self.leases: dict[str, EnvironmentLease] = {}

    async def do(self, state: Any, act: Callable[[FeatureDeletionEnv], T]) -> T | None:
        """None where the sandbox fails, or has failed before; the model is asked no more then."""
        if state.uuid not in self.leases:  # a stored sample has no sandbox any more
            fix = "keep the task's setup and scorer, and replace its solver alone."
            raise no_attempt("feature_deletion", fix)
        if state.uuid in self.failures:
            return None
        try:
            return await self.leases[state.uuid].do(act)
        except SandboxFailure as error:
            self.failures[state.uuid], state.completed = str(error), True
            return None

    async def end(self, state: Any) -> None:
        self.failures.pop(state.uuid, None)
        if lease := self.leases.pop(state.uuid, None):
            lease.release()


@task
def feature_deletion(store: str = "tasks", **options: Any) -> Any:
    """The tasks of a store as a task of inspect; ``options`` are fields of ``HostOptions``.

    A sample whose sandbox failed is unscored: it counts in no metric, and its explanation says what failed. One that the
    monitor masks has the score 0, and ``is_masked`` in the score's metadata.

    The library's own options name samples by the ids of tasks (``sample_id``), bound the model's answers to a sample
    (``turn_limit``, 50 by default) and take another solver, which finds our tools in ``state.tools``.
    """
    attempts = _Attempts(HostOptions(store=Path(store), **options))

    def sample(task_id: str) -> Sample:
        found = attempts.store.get(task_id)
        told = {"task_id": task_id, "repository": found.repository, "symbol": found.symbol}
        return Sample(input=first_message(attempts.store, found), id=task_id, metadata=told)

    return Task(
        dataset=MemoryDataset([*map(sample, attempts.store.task_ids())]),
        setup=open_attempt(attempts),
        solver=generate(),
        scorer=visible_tests(attempts),
        cleanup=attempts.end,
        turn_limit=50,
        name="feature_deletion",
    )


@solver
def open_attempt(attempts: _Attempts) -> Any:
    """Open the sandbox of a sample and offer its tools; a solver is not asked where it cannot be opened."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        del generate
        task_id = str(state.metadata["task_id"])
        attempts.leases[state.uuid] = attempts.lease()
        await attempts.do(state, lambda environment: environment.reset(task_id))
        state.tools = [_tool(attempts, spec, state) for spec in TOOLS]
        return state

    return solve


def _tool(attempts: _Attempts, spec: ToolSpec, state: TaskState) -> Tool:
    async def use(**kwargs: Any) -> str:
        call = ToolCall(spec.name, json.dumps(kwargs))
        made = await attempts.do(state, lambda environment: (environment.call(call), environment.is_done))
        if made is None:
            return BROKEN
        result, state.completed = made
        return result.text

    return ToolDef(
        use,
        name=spec.name,
        description=spec.description,
        parameters=ToolParams.model_validate(dict(spec.parameters)),
        parallel=False,  # they work on the same files
        max_output=0,  # ours is cut already, and says so
    ).as_tool()


@scorer(metrics=[mean(), stderr()])
def visible_tests(attempts: _Attempts) -> Any:
    """The reward that our grading gives; unscored where a sandbox failed. Its metadata has what the monitor found."""

    async def score(state: TaskState, target: Target) -> Score:
        del target
        for message in state.messages:  # the library itself refuses what it cannot read, or no tool takes
            if isinstance(message, ChatMessageTool) and message.error and message.error.type == "parsing":
                call = ToolCall(message.function or "", "(arguments that could not be read)")
                await attempts.do(state, partial(FeatureDeletionEnv.call, call=call))
        judgement = await attempts.do(state, attempts.judged)
        if judgement is None:
            return Score.unscored(reason="scoring_failed", explanation=attempts.failures[state.uuid])
        metadata: dict[str, Any] = {**judgement.figures}
        if judgement.report is not None:
            metadata["monitor"] = judgement.report.to_json()
        tests = judgement.score
        explanation = f"{tests.num_passed} of {len(tests.outcomes)} visible tests pass"
        explanation += f": {tests.error}" if tests.error else ""
        return Score(value=judgement.reward, metadata=metadata, explanation=explanation)

    return score
