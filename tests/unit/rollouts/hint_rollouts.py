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
)
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn
from composer_replication.rollouts.hints.hinted_turns import ObservedRollout

FILE = Path(__file__).parent / "fixtures" / "hint_rollouts.json"


@cache
def recorded() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(FILE.read_text())
    return data


def cases() -> list[dict[str, Any]]:
    return list(recorded()["cases"])


def observe(case: dict[str, Any]) -> ObservedRollout:
    turns = tuple(
        EpisodeTurn(
            (1,),
            Completion((7,) * turn["num_ids"], turn["text"], StopReason(turn["stop_reason"])),
            tuple(ToolCall(**call) for call in turn["calls"]),
            tuple(ToolResult(**result) for result in turn["results"]),
        )
        for turn in case["turns"]
    )
    score = case["score"]
    return ObservedRollout(
        Episode(
            "shelf--last",
            index=0,
            step=1,
            seed=0,
            turns=turns,
            reward=case["reward"],
            score=None
            if score is None
            else Score({test: Outcome(what) for test, what in score["outcomes"].items()}, score["error"]),
            stop_reason=StopReason(case.get("stop_reason", "finished")),
            tools=()
            if case.get("no_tools")
            else tuple(ToolSpec(*tool) for tool in recorded()["tools"].items()),
        )
    )


def episode_of(rollout: Rollout, **known: Any) -> Episode:
    """The episode whose turns these are; ``known`` are further fields."""
    turns = tuple(
        EpisodeTurn(turn.prompt_ids, turn.completion, segment_idx=idx)
        for idx, turn in enumerate(rollout.turns)
    )
    of_rollout = {
        "turns": turns,
        "stop_reason": rollout.stop_reason,
        "score": rollout.score,
        "reward": rollout.reward,
    }
    return Episode(rollout.task_id, 0, rollout.step, 0, **{**of_rollout, **known})


def single_turn(rollout: Rollout, **known: Any) -> ObservedRollout:
    """A rollout of one turn without tools; ``known`` are further fields."""
    return ObservedRollout(episode_of(rollout), **known)
