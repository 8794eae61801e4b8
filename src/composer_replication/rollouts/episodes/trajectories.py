"""Episodes on disk: one line of JSON each, in the Agent Trajectory Interchange Format (ATIF) of the Harbor project.

A line is one trajectory of ATIF v1.7. Standard fields hold what other tools read: messages, calls, results, token ids,
log-probabilities, counts. ``extra`` holds what the format has no field for, so that an episode is read back as it
was; only the ``chat`` of its turns, messages that hints are made from while it trains, is not stored.
Reference: Agent Trajectory Interchange Format, RFC 0001 of the Harbor project, 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.errors import InputError
from composer_replication.interfaces import AgentEnvironment
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
from composer_replication.rollouts.tools.tool_schemas import function_schema
from composer_replication.run_folder import rewrite_jsonl

ATIF_VERSION = "ATIF-v1.7"
OUR_VERSION = 1
"""Of what stands in ``extra.composer_replication``."""
_OURS = "composer_replication"


def write_trajectories(
    path: Path, episodes: Iterable[Episode], *, session_id: str = "composer-replication", model_name: str = ""
) -> None:
    """Write a file of episodes, whole or not at all; ``session_id`` is the run's, ``model_name`` the policy's.

    A number that JSON has no word for is refused (CR0401).
    """
    try:
        rewrite_jsonl(path, [trajectory_row(episode, session_id, model_name) for episode in episodes])
    except ValueError as error:
        raise _unusable(f"an episode cannot be written: {error}", path, "look at its numbers.") from error


def read_trajectories(path: Path) -> list[Episode]:
    """The episodes of a file, as they were written; refused where it is missing, damaged, or of somebody else (CR0401)."""
    advice = "give a file that write_trajectories wrote, or restore it from a copy."
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"it cannot be read: {error}", path, advice) from error
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found.append(_episode_of(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"line {number} is not an episode of ours ({type(error).__name__}: {error!s:.100})"
            raise _unusable(problem, path, advice) from error
    if lines[-1]:
        raise _unusable("its last line is not whole", path, advice)
    return found


def trajectory_row(episode: Episode, session_id: str = "", model_name: str = "") -> dict[str, Any]:
    """One episode as an ATIF object."""
    steps: list[dict[str, Any]] = []
    prompt_lengths: list[int] = []
    for idx, message in enumerate(episode.first_messages):
        steps.append(
            {"step_id": len(steps) + 1, "source": "user", "message": message, "extra": {"segment_idx": idx}}
        )
        num_seen = 0
        for turn in (each for each in episode.turns if each.segment_idx == idx):
            prompt_lengths.append(num_seen + len(turn.added_ids))
            steps.append(_step_of(turn, len(steps) + 1, prompt_lengths[-1], is_first=not num_seen))
            num_seen = prompt_lengths[-1] + len(turn.completion.token_ids)
    agent: dict[str, Any] = {
        "name": "composer-replication",
        "version": __version__,
        "tool_definitions": [function_schema(tool) for tool in episode.tools],
    }
    if model_name:
        agent["model_name"] = model_name
    return {
        "schema_version": ATIF_VERSION,
        "session_id": session_id,
        "trajectory_id": f"{session_id}/{episode.step}/{episode.index}",
        "agent": agent,
        "steps": steps,
        "final_metrics": {
            "total_steps": len(steps),
            "total_prompt_tokens": sum(prompt_lengths),
            "total_completion_tokens": sum(len(turn.completion.token_ids) for turn in episode.turns),
            "extra": {"reward": episode.reward, **asdict(episode.tokens)},
        },
        "extra": {
            _OURS: {
                "version": OUR_VERSION,
                "stop_reason": str(episode.stop_reason),
                "score": None if episode.score is None else asdict(episode.score),
                **{name: getattr(episode, name) for name in _PLAIN},
            }
        },
    }


def _step_of(turn: EpisodeTurn, step_id: int, num_prompt_ids: int, *, is_first: bool) -> dict[str, Any]:
    """An agent's step; the first of a conversation has its whole prompt, a later one the ids that were added to it."""
    completion = turn.completion
    metrics: dict[str, Any] = {
        "prompt_tokens": num_prompt_ids,
        "completion_tokens": len(completion.token_ids),
        "completion_token_ids": list(completion.token_ids),
    }
    if completion.token_logp:
        metrics["logprobs"] = list(completion.token_logp)
    if is_first:
        metrics["prompt_token_ids"] = list(turn.added_ids)
    else:
        metrics["extra"] = {"added_token_ids": list(turn.added_ids)}
    step: dict[str, Any] = {
        "step_id": step_id,
        "source": "agent",
        "message": completion.text,
        "metrics": metrics,
        "llm_call_count": 1,
        "extra": {
            "stop_reason": str(completion.stop_reason),
            "tokens": asdict(turn.tokens),
            **{name: getattr(turn, name) for name in _PLAIN_OF_TURN},
        },
    }
    call_ids = [f"call-{step_id}-{number}" for number in range(len(turn.calls))]
    if turn.calls:
        step["tool_calls"] = [
            {
                "tool_call_id": call_id,
                "function_name": call.name,
                "arguments": _as_object(call.arguments),
                "extra": {"arguments_text": call.arguments, "call_id": call.call_id},
            }
            for call_id, call in zip(call_ids, turn.calls, strict=True)
        ]
    if turn.results:
        rows = zip(call_ids, map(asdict, turn.results), strict=False)
        results = [{"source_call_id": n, "content": row.pop("text"), "extra": row} for n, row in rows]
        step["observation"] = {"results": results}
    return step


def _as_object(arguments: str) -> dict[str, Any]:
    """The arguments as the format wants them; empty where the policy wrote something else."""
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _episode_of(row: Mapping[str, Any]) -> Episode:
    """The episode that a line was made from."""
    ours = row["extra"][_OURS]
    if ours["version"] != OUR_VERSION:
        raise ValueError(f"version {ours['version']} is not {OUR_VERSION}")
    for before, step in pairwise(row["steps"]):
        seen = before.get("metrics", {})  # a message of the user has none, and begins a conversation
        is_later = bool(seen.get("prompt_tokens") or seen.get("completion_tokens"))
        if is_later and "prompt_token_ids" in step.get("metrics", {}):
            raise ValueError("a prompt does not begin with what came before it")
    agents = [step for step in row["steps"] if step["source"] != "user"]
    return Episode(
        turns=tuple(_turn_of(step) for step in agents),
        first_messages=tuple(step["message"] for step in row["steps"] if step["source"] == "user"),
        tools=tuple(ToolSpec(**each["function"]) for each in row["agent"]["tool_definitions"]),
        stop_reason=StopReason(ours["stop_reason"]),
        score=None if ours["score"] is None else _score_of(ours["score"]),
        **{name: ours[name] for name in _PLAIN},
    )


def _turn_of(step: Mapping[str, Any]) -> EpisodeTurn:
    metrics, extra = step["metrics"], step["extra"]
    added = (metrics.get("extra") or {}).get("added_token_ids")
    completion = Completion(
        tuple(metrics["completion_token_ids"]),
        step["message"],
        StopReason(extra["stop_reason"]),
        tuple(metrics.get("logprobs", ())),
    )
    calls = (
        ToolCall(row["function_name"], row["extra"]["arguments_text"], row["extra"]["call_id"])
        for row in step.get("tool_calls", ())
    )
    results = (
        ToolResult(row["content"], **row["extra"]) for row in step.get("observation", {}).get("results", ())
    )
    return EpisodeTurn(
        tuple(metrics["prompt_token_ids"] if added is None else added),
        completion,
        tuple(calls),
        tuple(results),
        tokens=TokenCounts(**extra["tokens"]),
        **{name: extra[name] for name in _PLAIN_OF_TURN},
    )


_PLAIN = ("task_id", "index", "step", "seed", "reward", "seconds", "grading_seconds", "num_tries", "failure")
_PLAIN_OF_TURN = ("segment_idx", "is_summary", "policy_seconds", "tool_seconds")


def _score_of(row: Mapping[str, Any]) -> Score:
    outcomes = {node: Outcome(outcome) for node, outcome in row["outcomes"].items()}
    return Score(outcomes, row["error"], row["seconds"], tuple(row.get("paid", ())))


def _unusable(problem: str, path: Path, fix: str) -> InputError:
    return InputError("CR0401", f"a file of trajectories is not usable: {problem}.", where=str(path), fix=fix)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found: the calls whose results are others now (recorded, replayed), whatever seconds each took, by turn and
    place within it, and the judgement of the tree (None where the sandbox failed).
    """

    num_calls: int
    partings: dict[tuple[int, int], tuple[ToolResult, ToolResult]]
    judgement: Any


def replay_episode(episode: Episode, environment: AgentEnvironment) -> Replay:
    """Do every call of an episode again, in its order, judge what is left, and close the environment; blocking.

    Calls without a result are left out: the episode ended before they were run. So are those that the loop itself
    refused, of answers with too many.
    """
    partings: dict[tuple[int, int], tuple[ToolResult, ToolResult]] = {}
    num_calls = 0
    try:
        environment.reset(episode.task_id)
        for turn_idx, turn in enumerate(episode.turns):
            pairs = zip(turn.calls, turn.results, strict=False)
            for call_idx, (call, recorded) in enumerate(pairs):
                if recorded.fault != "refused":
                    replayed = environment.call(call)
                    num_calls += 1
                    if recorded != replayed:
                        partings[turn_idx, call_idx] = recorded, replayed
        return Replay(num_calls, partings, environment.finish())
    finally:
        environment.close()
