"""Branches are executed: from the same restored tree, several times each, to the tests; and who does better is said with doubt."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from composer_replication.errors import SandboxFailure
from composer_replication.tasks.pass_intervals import wilson
from composer_replication.traces.prompts import (
    Message,
    assistant_message,
    calls_of,
    prompt_of,
    recorded_answer,
    tools_of,
)
from composer_replication.traces.redaction import Redactor
from composer_replication.traces.replay import Branching
from composer_replication.traces.teachers import Classroom
from composer_replication.traces.trace_records import Trace

if TYPE_CHECKING:
    from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv

Decision = Literal["better", "worse", "not decided"]
_VARYING = re.compile(
    r"0x[0-9a-f]{6,}|\b\d+\.\d+ ?s(?:ec(?:onds)?)?\b|/[\w./-]*/attempt-\w+/tree|\buser-\d+|\bpid \d+|\d{2}:\d{2}:\d{2}"
)
"""Addresses, durations, folders of one attempt, placeholders: they differ between two runs of the same command."""


def difference(passed: Sequence[float], recorded: Sequence[float]) -> tuple[float, float]:
    """Interval at 95% of the difference of two means in [0, 1], from Wilson's intervals of both.

    d - sqrt((p1 - l1)^2 + (u2 - p2)^2) to d + sqrt((u1 - p1)^2 + (p2 - l2)^2), with d = p1 - p2. For scores between 0 and 1 it is
    too wide rather than too narrow: their variance is at most that of a pass.
    Reference: Newcombe, Interval estimation for the difference between independent proportions, 1998, method 10.
    """
    (low1, high1), (low2, high2) = wilson(sum(passed), len(passed)), wilson(sum(recorded), len(recorded))
    p1, p2 = sum(passed) / len(passed), sum(recorded) / len(recorded)
    return p1 - p2 - math.hypot(p1 - low1, high2 - p2), p1 - p2 + math.hypot(high1 - p1, p2 - low2)


def decide(interval: tuple[float, float]) -> Decision:
    """Better or worse where the whole interval says so."""
    return "better" if interval[0] > 0 else "worse" if interval[1] < 0 else "not decided"


def reproduced(trace: Trace, idx: int, environment: FeatureDeletionEnv) -> tuple[int, int]:
    """Do the calls before step ``idx`` again; how many there were, and how many gave the recorded result."""
    num_calls = num_same = 0
    for place in trace.path_to(idx):
        step = trace.steps[place]
        known = {result.call_id: result for result in step.results}
        for call in step.calls:
            if (recorded := known.get(call.call_id)) is None:
                continue
            result = environment.call(call)
            num_calls += 1
            is_same = _VARYING.sub("*", Redactor().text(result.text)) == _VARYING.sub("*", recorded.text)
            num_same += is_same and result.exit_code == recorded.exit_code
    return num_calls, num_same


@dataclass(frozen=True, slots=True)
class Execution:
    """How branches are run: in attempts that ``open_attempt`` makes, played on by the teacher ``goes_on``."""

    open_attempt: Callable[[], FeatureDeletionEnv]
    room: Classroom
    goes_on: str
    num_tries: int = 3
    horizon: int = 6


async def execute(branching: Branching, how: Execution) -> dict[str, Any]:
    """Run the recorded answer and each other one from the same tree, ``num_tries`` times.

    After the answer both sides are played on by the same teacher for at most ``horizon`` answers, with another seed each
    try; then the visible tests are run.

    Returns:
        A line of ``verdicts.jsonl``: ``reproduced`` of ``calls`` recorded results came back on the way to the step;
        ``problem`` says why nothing was compared; ``verdicts`` has for each other answer the shares of passed tests, a try
        each, beside those of the recorded one, the interval of their difference and the decision.
    """
    trace, others = branching.trace, branching.others
    row: dict[str, Any] = {"trace_id": trace.trace_id, "step": branching.idx, "calls": 0, "reproduced": 0}
    row |= {"problem": "", "verdicts": []}
    if not others:
        return row | {"problem": "every teacher does the same"}
    environment = how.open_attempt()
    try:
        environment.reset(trace.state.task_id)
        row["calls"], row["reproduced"] = reproduced(trace, branching.idx, environment)
        if row["reproduced"] < row["calls"] or environment.is_done:
            return row | {"problem": "recorded results are not reproduced"}
        state = environment.snapshot()
        scores: list[list[float]] = []
        for answer in (recorded_answer(trace, branching.idx), *(answer for _, answer in others)):
            scores.append([])
            for number in range(how.num_tries):
                environment.restore(state)
                scores[-1].append(await _play(branching, answer, environment, how, number))
    except SandboxFailure as error:
        return row | {"problem": f"the sandbox failed ({error.code})"}
    finally:
        environment.close()
    for (source, answer), own in zip(others, scores[1:], strict=True):
        interval = difference(own, scores[0])
        verdict = {"source": source, "answer": answer, "scores": own, "recorded_scores": scores[0]}
        row["verdicts"].append(verdict | {"interval": interval, "decision": decide(interval)})
    return row


async def _play(
    branching: Branching, answer: Message, environment: FeatureDeletionEnv, how: Execution, number: int
) -> float:
    """The score of one try: the answer, what the teacher does after it, and then the visible tests."""
    trace, idx = branching.trace, branching.idx
    messages = prompt_of(trace, idx)
    current: Message | None = answer
    for turn in range(how.horizon + 1):
        if current is None:
            break
        calls = [replace(call, call_id=f"call-{idx}-{turn}-{n}") for n, call in enumerate(calls_of(current))]
        messages.append(assistant_message(current["content"], calls))
        for call in calls:
            text = environment.call(call).text
            messages.append({"role": "tool", "tool_call_id": call.call_id, "content": text})
        if environment.is_done or not calls or turn == how.horizon:
            break
        request = how.room.request(messages, tools_of(trace), sample=number + 1, temperature=1.0)
        current = await how.room.ask(how.goes_on, request)
    score = environment.grade()
    if score is None:
        raise SandboxFailure("CR0303", "the sandbox of a branch broke.", fix="composer-rl sandbox selftest")
    return score.pass_share
