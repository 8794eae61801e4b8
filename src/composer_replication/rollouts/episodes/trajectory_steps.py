"""A turn of an episode as a step of the Agent Trajectory Interchange Format, and back, losing nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from composer_replication.records import Completion, StopReason, ToolCall, ToolResult, Turn
from composer_replication.rollouts.episodes.episode import EpisodeTurn, TokenCounts
from composer_replication.rollouts.hints.hint_context import ObservedTurn


def step_of(
    turn: EpisodeTurn, step_id: int, before: Turn | None, *, has_full_prompts: bool
) -> dict[str, Any]:
    """An agent's step.

    ``before`` is the turn before in the same segment. Where the prompt begins with that turn's prompt and answer only
    the ids that were added are kept (``metrics.extra.added_token_ids``), and of its text only what differs, so that a
    long episode takes space in proportion to its length; ``has_full_prompts`` writes all of both in every step.
    """
    observed, completion = turn.observed, turn.observed.turn.completion
    prompt_ids, prompt_text = observed.turn.prompt_ids, observed.turn.prompt_text
    seen_ids = _ids_after(before)
    num_kept = 0 if before is None or has_full_prompts else _shared_length(before.prompt_text, prompt_text)
    metrics: dict[str, Any] = {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(completion.token_ids),
        "completion_token_ids": list(completion.token_ids),
    }
    if completion.token_logp:
        metrics["logprobs"] = list(completion.token_logp)
    extends = bool(seen_ids) and prompt_ids[: len(seen_ids)] == seen_ids
    if extends and not has_full_prompts:
        metrics["extra"] = {"added_token_ids": list(prompt_ids[len(seen_ids) :])}
    else:
        metrics["prompt_token_ids"] = list(prompt_ids)
    call_ids = [f"call-{step_id}-{number}" for number in range(len(observed.calls))]
    results = list(zip(call_ids, observed.results, strict=False))
    step: dict[str, Any] = {
        "step_id": step_id,
        "source": "agent",
        "message": completion.text,
        "metrics": metrics,
        "llm_call_count": 1,
        "extra": {
            "segment_idx": turn.segment_idx,
            "is_summary": turn.is_summary,
            "stop_reason": str(completion.stop_reason),
            "kept_characters": num_kept,
            "prompt_text": prompt_text[num_kept:],
            "policy_seconds": turn.policy_seconds,
            "tool_seconds": turn.tool_seconds,
            "tokens": asdict(turn.tokens),
        },
    }
    if observed.calls:
        pairs = zip(call_ids, observed.calls, strict=True)
        step["tool_calls"] = [_call_row(call_id, call) for call_id, call in pairs]
    if results:
        step["observation"] = {"results": [_result_row(call_id, result) for call_id, result in results]}
    return step


def turn_of(step: Mapping[str, Any], before: Turn | None) -> EpisodeTurn:
    """The turn that ``step_of`` made the step from; without its ``chat``, which is not stored.

    Raises:
        KeyError, TypeError, ValueError: it is not such a step.
    """
    metrics, extra = step["metrics"], step["extra"]
    added = (metrics.get("extra") or {}).get("added_token_ids")
    prompt_ids = tuple(metrics["prompt_token_ids"]) if added is None else (*_ids_after(before), *added)
    kept_text = "" if before is None else before.prompt_text[: extra["kept_characters"]]
    completion = Completion(
        tuple(metrics["completion_token_ids"]),
        step["message"],
        StopReason(extra["stop_reason"]),
        tuple(metrics.get("logprobs", ())),
    )
    calls = tuple(
        ToolCall(row["function_name"], row["extra"]["arguments_text"], row["extra"]["call_id"])
        for row in step.get("tool_calls", ())
    )
    results = tuple(
        ToolResult(row["content"], **row["extra"]) for row in step.get("observation", {}).get("results", ())
    )
    return EpisodeTurn(
        ObservedTurn(Turn(prompt_ids, completion, kept_text + extra["prompt_text"]), calls, results),
        segment_idx=extra["segment_idx"],
        is_summary=extra["is_summary"],
        policy_seconds=extra["policy_seconds"],
        tool_seconds=extra["tool_seconds"],
        tokens=TokenCounts(**extra["tokens"]),
    )


def _ids_after(turn: Turn | None) -> tuple[int, ...]:
    return () if turn is None else (*turn.prompt_ids, *turn.completion.token_ids)


def _shared_length(first: str, second: str) -> int:
    """Length of the beginning that both have; by halves, since prompts are long and mostly the same."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _call_row(call_id: str, call: ToolCall) -> dict[str, Any]:
    return {
        "tool_call_id": call_id,
        "function_name": call.name,
        "arguments": _as_object(call.arguments),
        "extra": {"arguments_text": call.arguments, "call_id": call.call_id},
    }


def _result_row(call_id: str, result: ToolResult) -> dict[str, Any]:
    extra = asdict(result)
    return {"source_call_id": call_id, "content": extra.pop("text"), "extra": extra}


def _as_object(arguments: str) -> dict[str, Any]:
    """The arguments as the format wants them; empty where the policy wrote something else."""
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
