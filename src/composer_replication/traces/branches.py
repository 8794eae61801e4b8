"""Recorded steps asked again of teachers, and their answers executed: from the same restored tree, several times each, to the tests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from composer_replication.errors import SandboxFailure
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.tasks.difficulty import wilson
from composer_replication.traces import prompts
from composer_replication.traces.prompts import Message, action, prompt_of, recorded_answer, tools_of
from composer_replication.traces.state_binding import redone
from composer_replication.traces.teachers import Classroom
from composer_replication.traces.trace_records import Trace

Chosen = tuple[Trace, int, list[str]]
Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Branching:
    """A step, and what the teachers would have done there; None of one that gave no answer."""

    trace: Trace
    idx: int
    reasons: tuple[str, ...]
    answers: tuple[tuple[str, Message | None], ...]

    @property
    def others(self) -> list[tuple[str, Message]]:
        """Answers that do something else than what was recorded, each once, with the first teacher that gave it."""
        found: dict[str, tuple[str, Message]] = {}
        for name, answer in self.answers:
            if answer is not None:
                found.setdefault(action(answer), (name, answer))
        found.pop(action(recorded_answer(self.trace, self.idx)), None)
        return list(found.values())

    def row(self) -> dict[str, Any]:
        """A line of ``replay.jsonl``."""
        return {
            "trace_id": self.trace.trace_id,
            "step": self.idx,
            "reasons": list(self.reasons),
            "prompt_origin": self.trace.prompt_origin,
            "recorded": recorded_answer(self.trace, self.idx),
            "answers": [{"teacher": name, "answer": answer} for name, answer in self.answers],
        }


def replay_cost(chosen: Sequence[Chosen], room: Classroom) -> dict[str, Any]:
    """What asking every teacher about every step can cost at most; nothing is sent."""
    return room.cost(map(partial(_request_about, room), chosen))


async def replay_steps(
    chosen: Sequence[Chosen], room: Classroom, *, report: Report | None = None
) -> tuple[list[Branching], bool]:
    """Ask every teacher about each step; the branchings in the order of ``chosen``, and whether the budget ended it early."""
    answers = await room.ask_all(chosen, partial(_request_about, room), report=report)
    found = [
        Branching(trace, idx, tuple(reasons), tuple(own.items()))
        for (trace, idx, reasons), own in zip(chosen, answers, strict=True)
    ]
    return found, room.is_spent


def _request_about(room: Classroom, step: Chosen) -> dict[str, Any]:
    return room.request(prompt_of(*step[:2]), tools_of(step[0]))


def difference(passed: Sequence[float], recorded: Sequence[float]) -> tuple[float, float]:
    """Interval at 95% of the difference of two means in [0, 1], from Wilson's intervals of both.

    d - sqrt((p1 - l1)^2 + (u2 - p2)^2) to d + sqrt((u1 - p1)^2 + (p2 - l2)^2), with d = p1 - p2. For scores between 0 and 1 it is
    too wide rather than too narrow: their variance is at most that of a pass.
    Reference: Newcombe, Interval estimation for the difference between independent proportions, 1998, method 10.
    """
    (low1, high1), (low2, high2) = wilson(sum(passed), len(passed)), wilson(sum(recorded), len(recorded))
    p1, p2 = sum(passed) / len(passed), sum(recorded) / len(recorded)
    return p1 - p2 - math.hypot(p1 - low1, high2 - p2), p1 - p2 + math.hypot(high1 - p1, p2 - low2)


def decide(interval: tuple[float, float]) -> str:
    """``better`` or ``worse`` where the whole interval says so, else ``not decided``."""
    return "better" if interval[0] > 0 else "worse" if interval[1] < 0 else "not decided"


@dataclass(frozen=True, slots=True)
class Execution:
    """How branches are run: in attempts that ``open_attempt`` makes, played on by the teacher ``goes_on``."""

    open_attempt: Callable[[], FeatureDeletionEnv]
    names: Mapping[str, str]
    room: Classroom
    goes_on: str
    num_tries: int
    horizon: int


async def execute(branching: Branching, how: Execution) -> dict[str, Any]:
    """Run the recorded answer and each other one from the same tree, and then the visible tests: a line of ``verdicts.jsonl``.

    After the answer both sides are played on by the same teacher, with another seed each try. ``reproduced`` of ``calls``
    recorded results came back on the way to the step; ``problem`` says why nothing was compared; ``verdicts`` has for each
    other answer the shares of passed tests, a try each, beside those of the recorded one, the interval of their difference
    and the decision.
    """
    trace, idx, others = branching.trace, branching.idx, branching.others
    row: dict[str, Any] = {
        "trace_id": trace.trace_id,
        "step": idx,
        "calls": 0,
        "reproduced": 0,
        "problem": "",
    }
    row["verdicts"] = []
    if not others:
        return row | {"problem": "every teacher does the same"}
    scores: list[list[float]] = []
    with how.open_attempt() as attempt:
        try:
            attempt.reset(how.names[trace.state.task_id])
            outcomes = Counter(redone(trace, trace.path_to(idx), attempt.call))
            row["calls"] = outcomes.total() - outcomes["not compared"]
            row["reproduced"] = outcomes["the same"]
            if outcomes["the same"] < row["calls"] or attempt.is_done:
                return row | {"problem": "recorded results are not reproduced"}
            restore = attempt.snapshot()
            for answer in (recorded_answer(trace, idx), *(answer for _, answer in others)):
                scores.append([])
                for number in range(how.num_tries):
                    restore()
                    scores[-1].append(await _play(branching, answer, attempt, how, number))
        except SandboxFailure as error:
            return row | {"problem": f"the sandbox failed ({error.code})"}
    for (source, answer), own in zip(others, scores[1:], strict=True):
        interval = difference(own, scores[0])
        verdict = {"source": source, "answer": answer, "scores": own, "recorded_scores": scores[0]}
        row["verdicts"].append(verdict | {"interval": interval, "decision": decide(interval)})
    return row


async def _play(
    branching: Branching, answer: Message, attempt: FeatureDeletionEnv, how: Execution, number: int
) -> float:
    """The score of one try: the answer, what the teacher does after it, and then the visible tests."""
    trace, idx = branching.trace, branching.idx
    messages = prompt_of(trace, idx)
    current: Message | None = answer
    for turn in range(how.horizon + 1):
        if current is None:
            break
        calls = prompts.calls_of(current)
        calls = [replace(call, call_id=f"call-{idx}-{turn}-{n}") for n, call in enumerate(calls)]
        messages.append(prompts.assistant_message(current["content"], calls))
        for call in calls:
            text = attempt.call(call).text
            messages.append({"role": "tool", "tool_call_id": call.call_id, "content": text})
        if attempt.is_done or not calls or turn == how.horizon:
            break
        request = how.room.request(messages, tools_of(trace), sample=number + 1, temperature=1.0)
        current = await how.room.ask(how.goes_on, request)
    if (score := attempt.grade()) is None:
        raise SandboxFailure("CR0303", "the sandbox of a branch broke.", fix="composer-rl sandbox selftest")
    return score.pass_share
