"""Recorded rollouts with tools, as data: what each command really said, and which turn went wrong."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from composer_replication.records import (
    Completion,
    Outcome,
    Rollout,
    Score,
    StopReason,
    ToolCall,
    ToolResult,
    ToolSpec,
    Turn,
)
from composer_replication.rollouts.hints.hint_context import ObservedRollout
from composer_replication.rollouts.tokens.chat import ObservedTurn

FILE = Path(__file__).parent / "fixtures" / "hint_rollouts.json"


@cache
def recorded() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(FILE.read_text())
    return data


def cases() -> list[dict[str, Any]]:
    return list(recorded()["cases"])


def observe(case: dict[str, Any]) -> ObservedRollout:
    turns = tuple(
        ObservedTurn(
            Turn((1,), Completion((7,) * turn["num_ids"], turn["text"], StopReason(turn["stop_reason"]))),
            tuple(ToolCall(**call) for call in turn["calls"]),
            tuple(ToolResult(**result) for result in turn["results"]),
        )
        for turn in case["turns"]
    )
    score = case["score"]
    rollout = Rollout(
        task_id="shelf--last",
        step=1,
        turns=tuple(turn.turn for turn in turns),
        reward=case["reward"],
        score=None
        if score is None
        else Score({test: Outcome(what) for test, what in score["outcomes"].items()}, score["error"]),
        stop_reason=StopReason(case.get("stop_reason", "finished")),
        seconds=1.0,
    )
    tools = () if case.get("no_tools") else tuple(ToolSpec(*tool) for tool in recorded()["tools"].items())
    return ObservedRollout(rollout, turns, tools=tools)


def single_turn(rollout: Rollout, **known: Any) -> ObservedRollout:
    """A rollout of one turn without tools; ``known`` are further fields."""
    return ObservedRollout(rollout, tuple(ObservedTurn(turn) for turn in rollout.turns), **known)
