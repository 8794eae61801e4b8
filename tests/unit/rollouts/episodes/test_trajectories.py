"""What is written is ATIF, and the very episode."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import atif
import pytest
from episode_parts import ECHO, TOOLS, Lives, ScriptedPolicy, parts, summarising
from pydantic import ValidationError
from stored_episodes import stored_episodes

from composer_replication.config import AgentSection
from composer_replication.errors import InputError
from composer_replication.rollouts.episodes.agent_loop import run_episodes
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.trajectories import trajectory_row, write_trajectories


def real_episodes() -> list[Episode]:
    made = parts(ScriptedPolicy(summarising), Lives())
    options = AgentSection(summary_tokens=120, max_context_tokens=260, max_new_tokens=259)
    return asyncio.run(run_episodes(["a", "b"], made, options=options, seed=3, step=7))


# ------------------------------------------------------------- the format, as its RFC has it


def atif_problems(line: str) -> list[str]:
    """What is wrong with a trajectory by the models of ATIF, which forbid unknown fields everywhere but in extra, and by its counts."""
    row = json.loads(re.sub(r"\\u(d[89a-f]\w\w)", r"\1", line))  # the models take no half of a character
    try:
        read = atif.Trajectory.model_validate(row)
    except ValidationError as error:
        return [str(error)]
    totals = (row["schema_version"], row["final_metrics"]["total_steps"])
    found = [] if read.steps and totals == ("ATIF-v1.7", len(read.steps)) else ["version or steps"]
    for step in read.steps:
        known = [call.tool_call_id for call in step.tool_calls or ()]
        found += ["a tool_call_id comes twice"] * (len(known) - len(set(known)))
        if (said := step.metrics) is None:
            continue
        for name, ids, num in (
            ("prompt", said.prompt_token_ids, said.prompt_tokens),
            ("completion", said.completion_token_ids, said.completion_tokens),
            ("logprobs", said.logprobs, said.completion_tokens),
        ):
            found += [name] if ids is not None and len(ids) != num else []
    return found


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.update(schema_version="1"),
        lambda row: row["steps"][0].update(metrics={}),
        lambda row: row["steps"][1].update(step_id=9),
        lambda row: row["steps"][1]["tool_calls"][0].update(arguments="text"),
        lambda row: row["steps"][1]["metrics"]["logprobs"].pop(),
        lambda row: row["steps"][1]["metrics"]["prompt_token_ids"].pop(),
        lambda row: row["final_metrics"].update(total_steps=1),
    ],
)
def test_the_check_of_the_format_bites(spoil: Any) -> None:
    row = trajectory_row(real_episodes()[0])
    assert atif_problems(json.dumps(row)) == []
    spoil(row)
    assert atif_problems(json.dumps(row)) != []


def test_the_conversations_of_an_episode_are_stored_as_they_were(tmp_path: Path) -> None:
    played = [
        replace(each, turns=tuple(replace(turn, chat=None) for turn in each.turns))
        for each in real_episodes()
    ]
    assert all(len(episode.first_messages) > 1 for episode in played)
    write_trajectories(tmp_path / "t.jsonl", played)
    assert stored_episodes(tmp_path / "t.jsonl") == played


@pytest.mark.parametrize("odd", ["\ud800", "\x00", '{"a": NaN}', '{"a": 1e999}', "[" * 5000, "[1]", "{", ""])
def test_whatever_a_model_says_is_stored_and_read_back(odd: str, tmp_path: Path) -> None:
    episode = real_episodes()[0]
    first, *rest = (replace(turn, chat=None) for turn in episode.turns)
    calls, results = (replace(first.calls[0], arguments=odd),), (replace(first.results[0], text=odd),)
    said = replace(first.completion, text=odd)
    turns = (replace(first, completion=said, calls=calls, results=results), *rest)
    write_trajectories(tmp_path / "t.jsonl", [replace(episode, turns=turns)])
    assert stored_episodes(tmp_path / "t.jsonl") == [replace(episode, turns=turns)]
    assert atif_problems((tmp_path / "t.jsonl").read_text().rstrip("\n")) == []


def test_a_line_has_what_other_tools_look_for() -> None:
    episode = real_episodes()[1]
    row = trajectory_row(episode, "run-1", "tiny")
    assert (row["session_id"], row["trajectory_id"]) == ("run-1", "run-1/7/1")
    assert row["agent"]["model_name"] == "tiny"
    assert [tool["function"]["name"] for tool in row["agent"]["tool_definitions"]] == [
        tool.name for tool in TOOLS
    ]
    first, second = row["steps"][0], row["steps"][1]
    assert (first["source"], first["message"]) == ("user", "do b")
    assert (second["source"], second["message"]) == ("agent", ECHO)
    assert second["tool_calls"][0]["arguments"] == {"text": "hello"}
    assert second["observation"]["results"][0]["content"] == "hello"
    turn = episode.turns[0]
    assert tuple(second["metrics"]["prompt_token_ids"]) == turn.added_ids
    assert tuple(second["metrics"]["completion_token_ids"]) == turn.completion.token_ids
    assert tuple(second["metrics"]["logprobs"]) == turn.completion.token_logp
    users = [step["message"] for step in row["steps"] if step["source"] == "user"]
    assert users == list(episode.first_messages)
    assert row["final_metrics"]["extra"]["reward"] == 1.0


def test_a_number_that_is_none_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectories(path, real_episodes())
    before = path.read_bytes()
    with pytest.raises(InputError, match="CR0401"):
        write_trajectories(path, [replace(real_episodes()[0], reward=float("nan"))])
    assert path.read_bytes() == before
