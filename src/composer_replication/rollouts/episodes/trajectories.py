"""What is kept of the episodes of a step: three files, one of them in the Agent Trajectory Interchange Format (ATIF) of the
Harbor project.

A line of it is one trajectory of ATIF v1.7. Standard fields hold what other tools read: messages, calls, results, token ids,
log-probabilities, counts. ``extra`` holds what the format has no field for, so that nothing of an episode is lost but its
judgement and the ``chat`` of its turns, messages that hints are made from while it trains.
Reference: Agent Trajectory Interchange Format, RFC 0001 of the Harbor project, 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.errors import InputError
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn
from composer_replication.rollouts.tools.tool_context import function_schema
from composer_replication.run_folder import rewrite_jsonl

ATIF_VERSION = "ATIF-v1.7"
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
        problem = f"a file of trajectories is not usable: an episode cannot be written: {error}."
        raise InputError("CR0401", problem, where=str(path), fix="look at its numbers.") from error


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
            "composer_replication": {
                "version": 1,  # of what stands here
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
