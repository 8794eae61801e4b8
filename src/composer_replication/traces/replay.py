"""Recorded steps asked again of teachers: what would others have done?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.prompts import our_calls, prompt_of, tools_of
from composer_replication.traces.teachers import BudgetSpent, Classroom, TeacherAnswer
from composer_replication.traces.trace_records import Trace

Chosen = tuple[Trace, int, list[str]]
Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Branching:
    """A step, what was recorded there, and what the teachers would have done; None of one that gave no answer."""

    trace: Trace
    idx: int
    reasons: tuple[str, ...]
    answers: tuple[tuple[str, TeacherAnswer | None], ...]

    @property
    def recorded(self) -> TeacherAnswer:
        step = self.trace.steps[self.idx]
        return TeacherAnswer(step.text, tuple(our_calls(self.trace, step)))

    @property
    def others(self) -> list[tuple[str, TeacherAnswer]]:
        """Answers that do something else than what was recorded, each once, with the first teacher that gave it."""
        seen = {action(self.recorded)}
        found = []
        for name, answer in self.answers:
            if answer is not None and action(answer) not in seen:
                seen.add(action(answer))
                found.append((name, answer))
        return found


def action(answer: TeacherAnswer) -> str:
    """What an answer does: its calls, however their arguments are spelled; its text where it calls nothing."""
    if not answer.calls:
        return answer.text.strip()
    return json.dumps([[call.name, _normal(call)] for call in answer.calls], sort_keys=True)


def replay_cost(chosen: Sequence[Chosen], room: Classroom) -> dict[str, Any]:
    """What asking every teacher about every step can cost at most; nothing is sent."""
    dollars, tokens, num_calls = 0.0, 0, 0
    for trace, idx, _ in chosen:
        request = room.request(prompt_of(trace, idx), tools_of(trace), sample=0, temperature=0.0)
        for teacher in room.teachers.values():
            most = room.most(teacher, request)
            dollars, tokens, num_calls = dollars + most[0], tokens + most[1], num_calls + 1
    return {"steps": len(chosen), "calls": num_calls, "most_dollars": dollars, "most_tokens": tokens}


async def replay_steps(
    chosen: Sequence[Chosen], room: Classroom, *, first_decides: bool = False, report: Report | None = None
) -> tuple[list[Branching], bool]:
    """Ask; the branchings in the order of ``chosen``, and whether the budget ended it early.

    Args:
        chosen: of ``chosen_steps``.
        room: the teachers.
        first_decides: the others are asked only where the first teacher would have done something else.
        report: takes (done, total, what it cost so far).
    """
    names = list(room.teachers)
    is_spent = False
    done = 0

    async def one(trace: Trace, idx: int, reasons: list[str]) -> Branching:
        nonlocal is_spent, done
        request = room.request(prompt_of(trace, idx), tools_of(trace), sample=0, temperature=0.0)
        answers: list[tuple[str, TeacherAnswer | None]] = []
        waves = [names[:1], names[1:]] if first_decides else [names]
        for wave in waves:
            found = await asyncio.gather(*(room.ask(name, request) for name in wave), return_exceptions=True)
            for name, answer in zip(wave, found, strict=True):
                if isinstance(answer, BudgetSpent):
                    is_spent = True
                elif isinstance(answer, BaseException):
                    raise answer
                answers.append((name, None if isinstance(answer, BaseException) else answer))
            branching = Branching(trace, idx, tuple(reasons), tuple(answers))
            if first_decides and not branching.others and answers and answers[0][1] is not None:
                break
        done += 1
        if report is not None:
            report(done, len(chosen), f"asked, {room.store.spent()[0]:.2f} dollars")
        return branching

    waiting = iter(chosen)
    found: dict[int, Branching] = {}

    async def worker() -> None:
        for place, each in numbered:
            found[place] = await one(*each)

    numbered = enumerate(waiting)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(32, len(chosen))):
            group.create_task(worker())
    return [found[place] for place in sorted(found)], is_spent


def branching_row(branching: Branching) -> dict[str, Any]:
    """A line of ``replay.jsonl``."""
    return {
        "trace_id": branching.trace.trace_id,
        "step": branching.idx,
        "reasons": list(branching.reasons),
        "prompt_origin": branching.trace.prompt_origin,
        "recorded": answer_row(branching.recorded),
        "answers": [
            {"teacher": name, "answer": None if answer is None else answer_row(answer)}
            for name, answer in branching.answers
        ],
    }


def answer_row(answer: TeacherAnswer) -> dict[str, Any]:
    """An answer as it stands in files."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    return {"text": answer.text, "calls": calls}


def answer_of(row: Mapping[str, Any]) -> TeacherAnswer:
    """The answer that ``answer_row`` wrote."""
    calls = (ToolCall(each["name"], each["arguments"], f"call-{n}") for n, each in enumerate(row["calls"]))
    return TeacherAnswer(row["text"], tuple(calls))


def _normal(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
