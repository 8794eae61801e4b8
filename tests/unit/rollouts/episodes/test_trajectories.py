"""What is written is ATIF, and the very episode."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episode_parts import ECHO, TOOLS, Lives, ScriptedPolicy, parts, summarising
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_episodes import stored_episodes

from composer_replication.config import AgentSection
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
from composer_replication.rollouts.episodes.agent_loop import run_episodes
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn, TokenCounts
from composer_replication.rollouts.episodes.trajectories import trajectory_row, write_trajectories


def real_episodes() -> list[Episode]:
    made = parts(ScriptedPolicy(summarising), Lives())
    options = AgentSection(summary_tokens=120, max_context_tokens=260, max_new_tokens=259)
    return asyncio.run(run_episodes(["a", "b"], made, options=options, seed=3, step=7))


# ---------------------------------------------------------------- any episode there can be

ids = st.lists(st.integers(0, 200_000), max_size=6).map(tuple)
texts = st.text(max_size=12) | st.text(st.characters(), max_size=6)  # lone surrogates too
seconds = st.floats(0, 1e6)
counts = st.integers(0, 10**6)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    sampled = draw(ids)
    logp = st.lists(st.floats(-50, 0), min_size=len(sampled), max_size=len(sampled)).map(tuple)
    return Completion(sampled, draw(texts), draw(st.sampled_from(StopReason)), draw(st.just(()) | logp))


arguments = texts | st.sampled_from(
    ['{"a": NaN}', '{"a": 1e999}', "[" * 5000, '{"a": {"b": [1]}}', "[1]", "{", ""]
)
tool_calls = st.builds(ToolCall, texts, arguments, texts)
exit_codes, faults = st.none() | st.integers(-9, 255), st.sampled_from(["", "invalid", "refused"])
tool_results = st.builds(ToolResult, texts, st.booleans(), exit_codes, st.booleans(), seconds, faults)
token_counts = st.builds(TokenCounts, counts, counts, counts, counts)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    turns: list[EpisodeTurn] = []
    num_segments = draw(st.integers(1, 3))
    for segment_idx in range(num_segments):
        for _ in range(draw(st.integers(0, 3))):
            calls = tuple(draw(st.lists(tool_calls, max_size=3)))
            results = tuple(draw(st.lists(tool_results, max_size=len(calls))))
            said = (draw(ids), draw(completions()), calls, results, None, segment_idx)
            took = (draw(st.booleans()), draw(seconds), draw(seconds), draw(token_counts))
            turns.append(EpisodeTurn(*said, *took))
    outcomes = st.dictionaries(texts, st.sampled_from(Outcome), max_size=3)
    paid = st.sampled_from([(), ("t.py::paid",)])
    specs = st.builds(ToolSpec, texts, st.just({"type": "object"}), texts)
    return Episode(
        task_id=draw(texts),
        index=draw(counts),
        step=draw(counts),
        seed=draw(st.integers(0, 2**63)),
        turns=tuple(turns),
        first_messages=tuple(draw(texts) for _ in range(num_segments)),
        tools=tuple(draw(st.lists(specs, max_size=2))),
        stop_reason=draw(st.sampled_from(StopReason)),
        score=draw(st.none() | st.builds(Score, outcomes, texts, seconds, paid, st.booleans())),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        seconds=draw(seconds),
        grading_seconds=draw(seconds),
        num_tries=draw(counts),
        failure=draw(texts),
    )


@pytest.mark.long
@settings(max_examples=60)
@given(st.lists(episodes(), max_size=3))
def test_what_is_stored_is_what_was_played(found: list[Episode]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.jsonl"
        write_trajectories(path, found, model_name="tiny")
        assert stored_episodes(path) == found
        for line in path.read_text().splitlines():
            assert atif_problems(json.loads(line)) == []
        assert [each.name for each in Path(folder).iterdir()] == ["step.jsonl"]


# ------------------------------------------------------------- the format, as its RFC has it

STEP = {"step_id", "timestamp", "source", "model_name", "reasoning_effort", "message", "reasoning_content"}
STEP |= {"tool_calls", "observation", "metrics", "extra", "llm_call_count", "is_copied_context"}
METRICS = {"prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "prompt_token_ids"}
METRICS |= {"completion_token_ids", "logprobs", "extra"}
ROOT = {"schema_version", "session_id", "trajectory_id", "agent", "steps", "notes", "final_metrics", "extra"}
ROOT |= {"continued_trajectory_ref", "subagent_trajectories"}
AGENT = {"name", "version", "model_name", "tool_definitions", "extra"}
FINAL = {"total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_cost_usd"}
FINAL |= {"total_steps", "extra"}
AGENT_ONLY = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


def atif_problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a trajectory by the rules of ATIF v1.7, which forbids unknown fields everywhere but in extra."""
    found = [f"root {name}" for name in set(row) - ROOT]
    found += [f"agent {name}" for name in set(row["agent"]) - AGENT]
    found += [f"final {name}" for name in set(row["final_metrics"]) - FINAL]
    if row["schema_version"] != "ATIF-v1.7" or not row["steps"]:
        found.append("version or steps")
    if row["final_metrics"]["total_steps"] != len(row["steps"]):
        found.append("total_steps")
    for number, step in enumerate(row["steps"], start=1):
        found += [f"step {name}" for name in set(step) - STEP]
        if step["step_id"] != number or step["source"] not in ("user", "agent", "system"):
            found.append(f"step {number} has a wrong id or source")
        if step["source"] != "agent":
            found += [f"{name} of no agent" for name in AGENT_ONLY & set(step)]
        found += _call_problems(step) + _metric_problems(step.get("metrics", {}))
    return found


def _call_problems(step: dict[str, Any]) -> list[str]:
    calls, results = step.get("tool_calls", []), step.get("observation", {}).get("results", [])
    known = [call["tool_call_id"] for call in calls]
    call_fields = {"tool_call_id", "function_name", "arguments", "extra"}
    bad_calls = [call for call in calls if set(call) - call_fields or not isinstance(call["arguments"], dict)]
    bad_results = [
        result
        for result in results
        if set(result) - {"source_call_id", "content", "extra"} or result["source_call_id"] not in known
    ]
    repeated = len(known) - len(set(known))
    return ["call"] * len(bad_calls) + ["result"] * len(bad_results) + ["id"] * repeated


def _metric_problems(metrics: dict[str, Any]) -> list[str]:
    found = [f"metrics {name}" for name in set(metrics) - METRICS]
    counted = {"prompt_token_ids": "prompt_tokens", "completion_token_ids": "completion_tokens"}
    found += [ids for ids, num in counted.items() if ids in metrics and len(metrics[ids]) != metrics[num]]
    if "logprobs" in metrics and len(metrics["logprobs"]) != metrics["completion_tokens"]:
        found.append("logprobs")
    return found


@pytest.mark.parametrize(
    "spoil",
    [
        lambda row: row.update(schema_version="1"),
        lambda row: row.update(reward=1),
        lambda row: row["steps"][0].update(metrics={}),
        lambda row: row["steps"][1].update(step_id=9),
        lambda row: row["steps"][1]["tool_calls"][0].update(arguments="text"),
        lambda row: row["steps"][1]["observation"]["results"][0].update(source_call_id="x"),
        lambda row: row["steps"][1]["metrics"]["logprobs"].pop(),
    ],
)
def test_the_check_of_the_format_bites(spoil: Any) -> None:
    row = trajectory_row(real_episodes()[0])
    assert atif_problems(row) == []
    spoil(row)
    assert atif_problems(row) != []


def test_the_conversations_of_an_episode_are_stored_as_they_were(tmp_path: Path) -> None:
    played = [
        replace(each, turns=tuple(replace(turn, chat=None) for turn in each.turns))
        for each in real_episodes()
    ]
    assert all(len(episode.first_messages) > 1 for episode in played)
    write_trajectories(tmp_path / "t.jsonl", played)
    assert stored_episodes(tmp_path / "t.jsonl") == played


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


def test_a_long_episode_takes_space_in_proportion_to_its_length(tmp_path: Path) -> None:
    sizes = []
    for num_turns in (20, 40, 80):
        limits = AgentSection(max_turns=num_turns, max_context_tokens=10**6)
        made = parts(ScriptedPolicy(lambda asked: ECHO), Lives())
        found = asyncio.run(run_episodes(["a"], made, options=limits))
        write_trajectories(tmp_path / "t.jsonl", found)
        sizes.append((tmp_path / "t.jsonl").stat().st_size)
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), rel=0.05)


def test_a_number_that_is_none_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trajectories(path, real_episodes())
    before = path.read_bytes()
    with pytest.raises(InputError, match="CR0401"):
        write_trajectories(path, [replace(real_episodes()[0], reward=float("nan"))])
    assert path.read_bytes() == before
