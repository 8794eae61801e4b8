"""The episodes of a file of trajectories, made again from its lines: what is stored is the very episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication import records
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn, TokenCounts


def stored_episodes(path: Path) -> list[Episode]:
    *lines, rest = path.read_text().split("\n")  # a text of an episode may hold other line ends
    assert not rest
    return [_episode_of(json.loads(line)) for line in lines]


def _episode_of(row: Mapping[str, Any]) -> Episode:
    ours, steps = row["extra"]["composer_replication"], row["steps"]
    assert ours.pop("version") == 1
    if score := ours.pop("score"):
        score["outcomes"] = {test: records.Outcome(outcome) for test, outcome in score["outcomes"].items()}
        score = records.Score(**{**score, "paid": tuple(score["paid"])})
    return Episode(
        turns=tuple(_turn_of(step) for step in steps if step["source"] == "agent"),
        first_messages=tuple(step["message"] for step in steps if step["source"] == "user"),
        tools=tuple(records.ToolSpec(**each["function"]) for each in row["agent"]["tool_definitions"]),
        stop_reason=records.StopReason(ours.pop("stop_reason")),
        score=score,
        **ours,
    )


def _turn_of(step: Mapping[str, Any]) -> EpisodeTurn:
    metrics, extra = step["metrics"], step["extra"]
    # a whole prompt where a conversation begins, what was added to it in every later step
    added = metrics["extra"]["added_token_ids"] if "extra" in metrics else metrics["prompt_token_ids"]
    ids, logp = tuple(metrics["completion_token_ids"]), tuple(metrics.get("logprobs", ()))
    results = step.get("observation", {}).get("results", ())
    return EpisodeTurn(
        tuple(added),
        records.Completion(ids, step["message"], records.StopReason(extra.pop("stop_reason")), logp),
        tuple(
            records.ToolCall(call["function_name"], call["extra"]["arguments_text"], call["extra"]["call_id"])
            for call in step.get("tool_calls", ())
        ),
        tuple(records.ToolResult(result["content"], **result["extra"]) for result in results),
        tokens=TokenCounts(**extra.pop("tokens")),
        **extra,
    )
