"""What is kept of the episodes of a step: three files, one of them in the Agent Trajectory Interchange Format (ATIF) of the
Harbor project.

A line of it is one trajectory of ATIF v1.7. Standard fields hold what other tools read: messages, calls, results, token ids,
log-probabilities, counts. ``extra`` holds what the format has no field for, so that an episode is read back as it
was; only the ``chat`` of its turns, messages that hints are made from while it trains, is not stored.
Reference: Agent Trajectory Interchange Format, RFC 0001 of the Harbor project, 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.errors import InputError
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
from composer_replication.rollouts.tools.tool_context import function_schema
from composer_replication.run_folder import rewrite_jsonl

ATIF_VERSION = "ATIF-v1.7"
OUR_VERSION = 1
"""Of what stands in ``extra.composer_replication``."""
_OURS = "composer_replication"
_PLAIN = ("task_id", "index", "step", "seed", "reward", "seconds", "grading_seconds", "num_tries", "failure")
_PLAIN_OF_TURN = ("segment_idx", "is_summary", "policy_seconds", "tool_seconds")


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
    for idx, message in enumerate(episode.first_messages):
        row = {"step_id": len(steps) + 1, "source": "user", "message": message}
        steps.append({**row, "extra": {"segment_idx": idx}})
        num_seen = 0
        for turn in (each for each in episode.turns if each.segment_idx == idx):
            steps.append(_step_of(turn, len(steps) + 1, num_seen))
            num_seen += len(turn.added_ids) + len(turn.completion.token_ids)
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    tools = [function_schema(tool) for tool in episode.tools]
    agent = {"name": "composer-replication", "version": __version__, "tool_definitions": tools}
    return {
        "schema_version": ATIF_VERSION,
        "session_id": session_id,
        "trajectory_id": f"{session_id}/{episode.step}/{episode.index}",
        "agent": agent | ({"model_name": model_name} if model_name else {}),
        "steps": steps,
        "final_metrics": {
            "total_steps": len(steps),
            "total_prompt_tokens": sum(each["prompt_tokens"] for each in metrics),
            "total_completion_tokens": sum(each["completion_tokens"] for each in metrics),
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


def _step_of(turn: EpisodeTurn, step_id: int, num_seen: int) -> dict[str, Any]:
    """An agent's step; the first of a conversation has its whole prompt, a later one the ids that were added to it."""
    completion, added = turn.completion, list(turn.added_ids)
    metrics: dict[str, Any] = {
        "prompt_tokens": num_seen + len(added),
        "completion_tokens": len(completion.token_ids),
        "completion_token_ids": list(completion.token_ids),
    }
    if completion.token_logp:
        metrics["logprobs"] = list(completion.token_logp)
    metrics |= {"extra": {"added_token_ids": added}} if num_seen else {"prompt_token_ids": added}
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
    if turn.calls:
        step["tool_calls"] = [
            {
                "tool_call_id": f"call-{step_id}-{number}",
                "function_name": call.name,
                "arguments": _as_object(call.arguments),
                "extra": {"arguments_text": call.arguments, "call_id": call.call_id},
            }
            for number, call in enumerate(turn.calls)
        ]
    if turn.results:
        rows = enumerate(map(asdict, turn.results))
        results = [
            {"source_call_id": f"call-{step_id}-{number}", "content": row.pop("text"), "extra": row}
            for number, row in rows
        ]
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
    ids, logp = tuple(metrics["completion_token_ids"]), tuple(metrics.get("logprobs", ()))
    calls = (
        ToolCall(row["function_name"], row["extra"]["arguments_text"], row["extra"]["call_id"])
        for row in step.get("tool_calls", ())
    )
    results = (
        ToolResult(row["content"], **row["extra"]) for row in step.get("observation", {}).get("results", ())
    )
    return EpisodeTurn(
        tuple(metrics["prompt_token_ids"] if added is None else added),
        Completion(ids, step["message"], StopReason(extra["stop_reason"]), logp),
        tuple(calls),
        tuple(results),
        tokens=TokenCounts(**extra["tokens"]),
        **{name: extra[name] for name in _PLAIN_OF_TURN},
    )


def _score_of(row: Mapping[str, Any]) -> Score:
    outcomes = {node: Outcome(outcome) for node, outcome in row["outcomes"].items()}
    return Score(outcomes, row["error"], row["seconds"], tuple(row.get("paid", ())))


def _unusable(problem: str, path: Path, fix: str) -> InputError:
    return InputError("CR0401", f"a file of trajectories is not usable: {problem}.", where=str(path), fix=fix)


class KeptEpisodes:
    """Writes three files for each step, whole or not at all; a step that is done again after a resume replaces them.

    ``step-000001.jsonl`` has a line for each rollout as a report reads it, its reward null where it moved no weight.
    ``episodes-000001.jsonl`` has ATIF lines with the reward as it was graded, ``findings-000001.jsonl`` a line for each episode
    in which the monitor found something.
    ``part`` is put into the names where several processes write. ``session_id`` of the run and ``model_name`` of its policy
    stand in every trajectory.
    """

    def __init__(self, folder: Path, *, part: str, session_id: str, model_name: str) -> None:
        self._folder, self._part = folder, part
        self._write = partial(write_trajectories, session_id=session_id, model_name=model_name)
        self._played: list[Episode] = []  # of the newest step

    def keep(self, played: Sequence[Episode]) -> None:
        """Add the episodes of a generation; dynamic sampling makes several of one step."""
        if self._played and self._played[0].step != played[0].step:
            self._played = []
        self._played += played
        rewrite_jsonl(self._path("step"), [_line(each) for each in self._played])
        self._write(self._path("episodes"), self._played)
        findings = [row for each in self._played if (row := _findings(each)) is not None]
        if findings or self._path("findings").is_file():
            rewrite_jsonl(self._path("findings"), findings)

    def keep_evaluation(self, name: str, played: Sequence[Episode]) -> None:
        """Trajectories that nothing is learned from, in a file of this name."""
        self._write(self._folder / f"{name}{self._part}.jsonl", played)

    def _path(self, kind: str) -> Path:
        return self._folder / f"{kind}-{self._played[0].step:06d}{self._part}.jsonl"


def _line(episode: Episode) -> dict[str, Any]:
    """A rollout as those of single answers are kept: its text is all that was said, called and answered."""
    score, patch = episode.score, getattr(episode.judgement, "patch", None)
    said: list[str] = []
    for turn in episode.turns:
        said += [turn.completion.text, *(f"=> {result.text}" for result in turn.results)]
    return {
        "task_id": episode.task_id,
        "step": episode.step,
        "text": "\n".join(said),
        **({} if patch is None else {"patch": patch}),
        "num_turns": len(episode.turns),
        "reward": episode.paid,
        "outcomes": {} if score is None else {node: str(outcome) for node, outcome in score.outcomes.items()},
        "error": "" if score is None else score.error,
        "stop_reason": str(episode.stop_reason),
        "seconds": round(episode.seconds, 4),
    }


def _findings(episode: Episode) -> dict[str, Any] | None:
    """What the monitor found. It counts the calls of the whole attempt; here each is told by turn and place within the turn."""
    report = None if episode.judgement is None else episode.judgement.report
    if report is None or not report.findings:
        return None
    places = [
        (turn_idx, call_idx)
        for turn_idx, turn in enumerate(episode.turns)
        for call_idx, result in enumerate(turn.results)
        if result.fault != "refused"  # such a call never reached the environment
    ]
    findings = list(report.findings)
    for idx, finding in enumerate(findings):
        if finding.turn_idx is not None and finding.turn_idx < len(places):
            turn_idx, call_idx = places[finding.turn_idx]
            findings[idx] = replace(finding, turn_idx=turn_idx, call_idx=call_idx)
    report = replace(report, findings=tuple(findings))
    told = {"step": episode.step, "index": episode.index, "seed": episode.seed, "task_id": episode.task_id}
    return {**told, **report.to_json()}
