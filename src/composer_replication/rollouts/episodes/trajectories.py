"""Episodes on disk: one line of JSON each, in the Agent Trajectory Interchange Format (ATIF) of the Harbor project.

A line is one trajectory of ATIF v1.7. Standard fields hold what other tools read: messages, calls, results, token ids,
log-probabilities, counts. ``extra`` holds what the format has no field for, so that an episode is read back as it
was; only the ``chat`` of its turns, messages that hints are made from while it trains, is not stored.
Reference: Agent Trajectory Interchange Format, RFC 0001 of the Harbor project, 2025.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.errors import InputError
from composer_replication.records import Outcome, Score, StopReason, ToolSpec, Turn
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn, segment_tokens
from composer_replication.rollouts.episodes.trajectory_steps import step_of, turn_of
from composer_replication.rollouts.tools.tool_schemas import function_schema
from composer_replication.run_folder import rewrite_jsonl

ATIF_VERSION = "ATIF-v1.7"
OUR_VERSION = 1
"""Of what stands in ``extra.composer_replication``."""
_OURS = "composer_replication"


@dataclass(frozen=True, slots=True)
class TrajectoryOptions:
    """How episodes are written.

    Args:
        session_id: of the run; the same in every line.
        model_name: of the policy; empty leaves it out.
        has_full_prompts: every step has all ids and all text of its prompt, which takes space with the square of the number of
            turns. By default a step has those that were added since the one before.
        secrets: texts that no line may hold, the key of a server for example.
    """

    session_id: str = "composer-replication"
    model_name: str = ""
    has_full_prompts: bool = False
    secrets: tuple[str, ...] = ()


def write_trajectories(
    path: Path, episodes: Iterable[Episode], options: TrajectoryOptions | None = None
) -> None:
    """Write a file of episodes, whole or not at all.

    Raises:
        InputError: an episode holds a secret, or a number that JSON has no word for (CR0825); nothing is written.
    """
    options = options or TrajectoryOptions()
    rows = []
    for episode in episodes:
        if _holds_secret(episode, options):
            raise _unusable("an episode holds a secret", path, "find out how it got into the sandbox.")
        rows.append(trajectory_row(episode, options))
    try:
        rewrite_jsonl(path, rows)
    except ValueError as error:
        raise _unusable(f"an episode cannot be written: {error}", path, "look at its numbers.") from error


def read_trajectories(path: Path) -> list[Episode]:
    """The episodes of a file, as they were written.

    Raises:
        InputError: the file is missing, damaged, or of somebody else (CR0825).
    """
    advice = "give a file that write_trajectories wrote, or restore it from a copy."
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"it cannot be read: {error}", path, advice) from error
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            found.append(episode_of(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"line {number} is not an episode of ours ({type(error).__name__}: {error!s:.100})"
            raise _unusable(problem, path, advice) from error
    if lines[-1]:
        raise _unusable("its last line is not whole", path, advice)
    return found


def trajectory_row(episode: Episode, options: TrajectoryOptions) -> dict[str, Any]:
    """One episode as an ATIF object."""
    steps: list[dict[str, Any]] = []
    for idx, message in enumerate(episode.first_messages):
        steps.append(
            {"step_id": len(steps) + 1, "source": "user", "message": message, "extra": {"segment_idx": idx}}
        )
        before: Turn | None = None
        for turn in (each for each in episode.turns if each.segment_idx == idx):
            steps.append(step_of(turn, len(steps) + 1, before, has_full_prompts=options.has_full_prompts))
            before = turn.observed.turn
    agent: dict[str, Any] = {
        "name": "composer-replication",
        "version": __version__,
        "tool_definitions": [function_schema(tool) for tool in episode.tools],
    }
    if options.model_name:
        agent["model_name"] = options.model_name
    final: dict[str, Any] = {
        "total_steps": len(steps),
        "extra": {"reward": episode.reward, **asdict(episode.tokens)},
    }
    if episode.is_trainable:
        turns = [each.observed.turn for each in episode.turns]
        final["total_prompt_tokens"] = sum(len(turn.prompt_ids) for turn in turns)
        final["total_completion_tokens"] = sum(len(turn.completion.token_ids) for turn in turns)
    return {
        "schema_version": ATIF_VERSION,
        "session_id": options.session_id,
        "trajectory_id": f"{options.session_id}/{episode.step}/{episode.index}",
        "agent": agent,
        "steps": steps,
        "final_metrics": final,
        "extra": {_OURS: _our_fields(episode)},
    }


def episode_of(row: Mapping[str, Any]) -> Episode:
    """The episode that a line was made from.

    Raises:
        KeyError, TypeError, ValueError: the line is not one of ours.
    """
    ours = row["extra"][_OURS]
    if ours["version"] != OUR_VERSION:
        raise ValueError(f"version {ours['version']} is not {OUR_VERSION}")
    messages: list[str] = []
    turns: list[EpisodeTurn] = []
    before: Turn | None = None
    for step in row["steps"]:
        if step["source"] == "user":
            messages.append(step["message"])
            before = None
        else:
            turns.append(turn_of(step, before))
            before = turns[-1].observed.turn
    score = ours["score"]
    return Episode(
        turns=tuple(turns),
        first_messages=tuple(messages),
        tools=tuple(ToolSpec(**each["function"]) for each in row["agent"]["tool_definitions"]),
        stop_reason=StopReason(ours["stop_reason"]),
        score=None
        if score is None
        else Score(
            {node: Outcome(outcome) for node, outcome in score["outcomes"].items()},
            score["error"],
            score["seconds"],
        ),
        **{name: ours[name] for name in _PLAIN},
    )


_PLAIN = ("task_id", "index", "step", "seed", "reward", "seconds", "grading_seconds", "num_tries", "failure")


def _our_fields(episode: Episode) -> dict[str, Any]:
    score = episode.score
    return {
        "version": OUR_VERSION,
        "stop_reason": str(episode.stop_reason),
        "score": None
        if score is None
        else {
            "outcomes": {node: str(outcome) for node, outcome in score.outcomes.items()},
            "error": score.error,
            "seconds": score.seconds,
        },
        "masks": [_mask_runs(episode, idx) for idx in range(len(episode.first_messages))],
        **{name: getattr(episode, name) for name in _PLAIN},
    }


def _mask_runs(episode: Episode, segment_idx: int) -> list[list[int]] | None:
    """The mask of a segment after its first prompt, as runs ``[bit, length]``; None where it has no exact ids."""
    segment = episode.segments[segment_idx]
    try:
        mask = segment_tokens(segment).mask if segment.turns else ()
    except InputError:
        return None
    return [[bit, len(list(run))] for bit, run in groupby(mask)]


def _holds_secret(episode: Episode, options: TrajectoryOptions) -> bool:
    secrets = [secret for secret in options.secrets if secret]
    if not secrets:
        return False
    whole = trajectory_row(episode, replace(options, has_full_prompts=True))  # no prompt in two pieces
    return any(secret in text for text in _texts(whole) for secret in secrets)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            if not isinstance(inner, int):  # ids, the most of it
                yield from _texts(inner)


def _unusable(problem: str, path: Path, fix: str) -> InputError:
    return InputError("CR0825", f"a file of trajectories is not usable: {problem}.", where=str(path), fix=fix)
