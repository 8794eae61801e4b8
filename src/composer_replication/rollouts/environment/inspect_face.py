"""An ``inspect_ai`` task: samples of a store, our tools in our sandboxes, our grading as the scorer.

``inspect eval composer_replication/feature_deletion -T store=tasks``. The sandbox is ours and is reached through the
tools alone; the library's own sandbox tools find none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from composer_replication.errors import UsageError, needs_extra
from composer_replication.records import MonitorMode, ToolCall, ToolSpec
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.environment.hosted_attempt import AttemptHost, HostedAttempt
from composer_replication.rollouts.tools.toolbox import TOOLS

with needs_extra("inspect", "the inspect task"):
    from inspect_ai import Task, task
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.model import ChatMessageTool, execute_tools
    from inspect_ai.scorer import SampleScore, Score, Target, mean, metric, scorer, stderr
    from inspect_ai.solver import Generate, TaskState, solver
    from inspect_ai.tool import Tool, ToolDef, ToolParams


MAX_TURNS = 50
"""Answers of a model to one sample, where nobody says otherwise."""


class _Attempts:
    """Those that are open, by the id that the library gives a run of a sample."""

    def __init__(self, host: AttemptHost) -> None:
        self.host = host
        self._open: dict[str, HostedAttempt] = {}

    async def begin(self, state: Any) -> HostedAttempt:
        self._open[state.uuid] = attempt = await self.host.open(str(state.metadata["task_id"]))
        return attempt

    def of(self, state: Any) -> HostedAttempt:
        if state.uuid not in self._open:
            raise UsageError(
                "CR0800",
                "a sample of inspect has no attempt under way.",
                where="feature_deletion",
                fix="keep the task's setup and scorer, and replace its solver alone.",
            )
        return self._open[state.uuid]

    async def end(self, state: Any) -> None:
        attempt = self._open.pop(state.uuid, None)
        if attempt is not None:
            await attempt.end()


@task
def feature_deletion(
    store: str = "tasks",
    task_ids: Sequence[str] | str = (),
    *,
    solver: Any = None,
    max_turns: int = MAX_TURNS,
    backend: str = "",
    num_jobs: int = 2,
    test_seconds: float = 20.0,
    with_hidden: bool = False,
    rule: Literal["fraction", "all_or_nothing"] = "fraction",
    breaks: Literal["mask", "cost", "ignore"] = "mask",
    break_sample: int = 0,
    invalid_call_cost: float = 0.0,
    monitor: MonitorMode = "mask",
) -> Any:
    """The tasks of a store as a task of inspect.

    A sample whose sandbox failed is unscored: it counts in no metric, and its explanation says what failed. One that the
    monitor masks has the score 0, and counts in ``num_masked``.

    ``task_ids`` names some of the tasks of ``store``, as a list or as one text with commas; ``solver`` takes the place of
    ``tool_loop`` and finds our tools in ``state.tools``; ``max_turns`` bounds the answers of the model to a sample. The
    others are those of ``AttemptHost`` and ``RewardOptions``.
    """
    host = AttemptHost(
        Path(store),
        backend=backend,
        num_jobs=num_jobs,
        test_seconds=test_seconds,
        with_hidden=with_hidden,
        monitor=monitor,
        rule=rule,
        breaks=breaks,
        break_sample=break_sample,
        invalid_call_cost=invalid_call_cost,
    )
    attempts = _Attempts(host)
    wanted = task_ids.split(",") if isinstance(task_ids, str) else list(task_ids)
    return Task(
        dataset=MemoryDataset([_sample(host, task_id) for task_id in wanted or host.store.task_ids()]),
        setup=open_attempt(attempts),
        solver=solver or tool_loop(attempts),
        scorer=visible_tests(attempts),
        cleanup=attempts.end,
        turn_limit=max_turns,
        name="feature_deletion",
    )


@solver
def open_attempt(attempts: _Attempts) -> Any:
    """Open the sandbox of a sample and offer its tools; a solver is not asked where it cannot be opened."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        del generate
        attempt = await attempts.begin(state)
        state.tools = [_tool(attempt, spec) for spec in TOOLS]
        state.completed = bool(attempt.failure)
        return state

    return solve


@solver
def tool_loop(attempts: _Attempts) -> Any:
    """Ask the model and make its calls in their order, until ``submit`` or an answer without a call."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        attempt = attempts.of(state)
        while not attempt.is_over:
            state = await generate(state, tool_calls="none")
            if not state.output.message.tool_calls:
                break
            done = await execute_tools(state.messages, state.tools)
            state.messages.extend(done.messages)
            for message in done.messages:  # the library itself refuses what it cannot read, or no tool takes
                if isinstance(message, ChatMessageTool) and message.error and message.error.type == "parsing":
                    await attempt.count_unreadable_call(message.function or "")
        return state

    return solve


@metric
def num_masked() -> Any:
    """Samples whose reward the monitor masked."""

    def count(scores: list[SampleScore]) -> float:
        return float(sum((each.score.metadata or {}).get("is_masked", 0.0) for each in scores))

    return count


@scorer(metrics=[mean(), stderr(), num_masked()])
def visible_tests(attempts: _Attempts) -> Any:
    """The reward that our grading gives; unscored where a sandbox failed. Its metadata has what the monitor found."""

    async def score(state: TaskState, target: Target) -> Score:
        del target
        attempt = attempts.of(state)
        outcome = await attempt.outcome()
        if outcome.judgement is None:
            return Score.unscored(reason="scoring_failed", explanation=attempt.failure)
        metadata: dict[str, Any] = {**outcome.figures}
        if outcome.monitor is not None:
            metadata["monitor"] = outcome.monitor
        tests = outcome.judgement.score
        explanation = f"{tests.num_passed} of {len(tests.outcomes)} visible tests pass"
        explanation += f": {tests.error}" if tests.error else ""
        return Score(value=outcome.reward, metadata=metadata, explanation=explanation)

    return score


def _sample(host: AttemptHost, task_id: str) -> Any:
    found = host.store.get(task_id)
    return Sample(
        input=first_message(host.store, found),
        id=task_id,
        metadata={"task_id": task_id, "repository": found.repository, "symbol": found.symbol},
    )


def _tool(attempt: HostedAttempt, spec: ToolSpec) -> Tool:
    async def use(**kwargs: Any) -> str:
        return (await attempt.call(ToolCall(spec.name, json.dumps(kwargs)))).text

    return ToolDef(
        use,
        name=spec.name,
        description=spec.description,
        parameters=ToolParams.model_validate(dict(spec.parameters)),
        parallel=False,  # they work on the same files
        max_output=0,  # ours is cut already, and says so
    ).as_tool()
