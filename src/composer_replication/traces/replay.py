"""Recorded steps asked again of teachers: what would others have done?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.traces.prompts import Message, action, prompt_of, recorded_answer, tools_of
from composer_replication.traces.teachers import BudgetSpent, Classroom
from composer_replication.traces.trace_records import Trace

Chosen = tuple[Trace, int, list[str]]
Report = Callable[[int, int, str], None]
_NUM_STEPS_AT_A_TIME = 32


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
    requests = [room.request(prompt_of(trace, idx), tools_of(trace)) for trace, idx, _ in chosen]
    most = [room.most(teacher, request) for request in requests for teacher in room.teachers.values()]
    dollars, tokens = sum(each[0] for each in most), sum(each[1] for each in most)
    return {"steps": len(chosen), "calls": len(most), "most_dollars": dollars, "most_tokens": tokens}


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
    at_a_time = asyncio.Semaphore(_NUM_STEPS_AT_A_TIME)
    num_done, is_spent = 0, False

    async def asked(name: str, request: Mapping[str, Any]) -> tuple[str, Message | None]:
        nonlocal is_spent
        try:
            return name, await room.ask(name, request)
        except BudgetSpent:
            is_spent = True
            return name, None

    async def branching(trace: Trace, idx: int, reasons: list[str]) -> Branching:
        nonlocal num_done
        async with at_a_time:
            request = room.request(prompt_of(trace, idx), tools_of(trace))
            found = Branching(trace, idx, tuple(reasons), ())
            for wave in [names[:1], names[1:]] if first_decides else [names]:
                answers = await asyncio.gather(*(asked(name, request) for name in wave))
                found = Branching(trace, idx, tuple(reasons), (*found.answers, *answers))
                if first_decides and not found.others and answers and answers[0][1] is not None:
                    break
            num_done += 1
            if report is not None:
                report(num_done, len(chosen), f"asked, {room.store.spent()[0]:.2f} dollars")
            return found

    return list(await asyncio.gather(*(branching(*each) for each in chosen))), is_spent
