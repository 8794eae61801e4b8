"""The episodes of a file of trajectories, made again from its lines: what is stored is the very episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.records import (
    Completion,
    Outcome,
    Score,
    StopReason,
    ToolCall,
    ToolResult,
    ToolSpec,
)
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn, TokenCounts


def stored_episodes(path: Path) -> list[Episode]:
    text = path.read_text()
    assert text == "" or text.endswith(
        "\n"
    )  # a text of an episode may hold other line ends, so no splitlines
    return [_episode_of(json.loads(line)) for line in text.split("\n")[:-1]]


def _episode_of(row: Mapping[str, Any]) -> Episode:
    ours = dict(row["extra"]["composer_replication"])
    assert ours.pop("version") == 1
    score, stop_reason = ours.pop("score"), ours.pop("stop_reason")
    if score is not None:
        outcomes = {node: Outcome(outcome) for node, outcome in score["outcomes"].items()}
        score = Score(outcomes, score["error"], score["seconds"], tuple(score["paid"]))
    steps = row["steps"]
    return Episode(
        turns=tuple(_turn_of(step) for step in steps if step["source"] == "agent"),
        first_messages=tuple(step["message"] for step in steps if step["source"] == "user"),
        tools=tuple(ToolSpec(**each["function"]) for each in row["agent"]["tool_definitions"]),
        stop_reason=StopReason(stop_reason),
        score=score,
        **ours,
    )


def _turn_of(step: Mapping[str, Any]) -> EpisodeTurn:
    metrics, extra = step["metrics"], dict(step["extra"])
    stop_reason, tokens = extra.pop("stop_reason"), extra.pop("tokens")
    # a whole prompt is written where a conversation begins, what was added to it everywhere else
    assert ("prompt_token_ids" in metrics) is ("extra" not in metrics)
    prompt_ids = (
        metrics["prompt_token_ids"] if "extra" not in metrics else metrics["extra"]["added_token_ids"]
    )
    calls = (
        ToolCall(each["function_name"], each["extra"]["arguments_text"], each["extra"]["call_id"])
        for each in step.get("tool_calls", ())
    )
    results = (
        ToolResult(each["content"], **each["extra"])
        for each in step.get("observation", {}).get("results", ())
    )
    return EpisodeTurn(
        tuple(prompt_ids),
        Completion(
            tuple(metrics["completion_token_ids"]),
            step["message"],
            StopReason(stop_reason),
            tuple(metrics.get("logprobs", ())),
        ),
        tuple(calls),
        tuple(results),
        tokens=TokenCounts(**tokens),
        **extra,
    )
