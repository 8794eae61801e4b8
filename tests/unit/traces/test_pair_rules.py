"""Which pairs are made, which are dropped and why; and how a verdict doubts."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from composer_replication.cli import traces_verb
from composer_replication.cli.main import main
from composer_replication.errors import InputError
from composer_replication.records import ToolCall
from composer_replication.rollouts.tools.tool_context import function_schema
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.run_folder import rewrite_jsonl
from composer_replication.tasks.difficulty import difference
from composer_replication.traces.json_values import json_bytes
from composer_replication.traces.pairs import (
    ChosenStep,
    assistant_message,
    balanced,
    executed_pairs,
    objection_pairs,
    read_pair_rows,
    sft_rows,
    sibling_pairs,
)
from composer_replication.traces.readers.messages import trace_row
from composer_replication.traces.replay import Execution, execute
from composer_replication.traces.trace_records import StepResult, Trace, TraceStep


def session(name: str, *commands: str, passed: bool | None = None, denied: int | None = None) -> Trace:
    trace = Trace(name, "atif", prompt_origin="recorded", passed=passed)
    trace.task_id = "task"
    trace.tools = [function_schema(tool) for tool in TOOLS]
    trace.add(TraceStep("user", "fix it"))
    for number, command in enumerate(commands):
        call = ToolCall("bash", json.dumps({"command": command}), f"c{number}")
        flags = {"denied"} if number == denied else set[str]()
        result = StepResult(call.call_id, f"did {command}")
        trace.add(TraceStep("agent", calls=[call], results=[result], flags=flags))
    return trace


def test_newcombes_example() -> None:
    """56 of 70 against 48 of 80: 0.2, and 0.0524 to 0.3339 (Newcombe 1998, table II, method 10)."""
    low, high = difference([1.0] * 56 + [0.0] * 14, [1.0] * 48 + [0.0] * 32)
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def verdict(decision: str, scores: list[float], recorded: list[float]) -> dict[str, object]:
    function = {"name": "bash", "arguments": {"command": "better"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
    row = {"source": "t", "answer": answer, "scores": scores, "recorded_scores": recorded}
    return {**row, "interval": [0, 0], "decision": decision}


def executed(shares: list[float], num_tries: int, horizon: int) -> dict[str, Any]:
    """A step of which the other answer is executed; so large ``shares`` of the tests pass, first in the recorded answer's tries."""
    attempt, room = MagicMock(is_done=False), MagicMock(ask=AsyncMock(return_value=None))
    attempt.__enter__.return_value = attempt
    attempt.call.return_value.text = "did it"
    attempt.grade.side_effect = [MagicMock(pass_share=share) for share in shares]
    step = ChosenStep(session("s", "a"), 1, [], {"t": verdict("", [], [])["answer"]})
    room.teachers = {"t": MagicMock(left_out="no key")}
    how = Execution(lambda: attempt, {"task": "task"}, room, "t", num_tries, horizon)
    row = asyncio.run(execute(step, how))
    assert attempt.snapshot.return_value.call_count == max(1, len(shares))  # restored before each try
    return row


def test_a_branch_that_its_teacher_leaves_alone_has_no_verdict() -> None:
    row = executed([], 1, 1)
    assert (row["problem"], row["verdicts"]) == ("the teacher that plays on gave no answer", [])


@pytest.mark.parametrize(
    ("passed", "recorded", "decision"),
    [
        ([1.0] * 3, [0.0] * 3, "better"),
        ([0.0] * 4, [1.0] * 4, "worse"),
        ([1.0, 0.0, 1.0], [0.0, 1.0, 0.0], "not decided"),
        ([1.0] * 3, [1.0] * 3, "not decided"),
        ([0.6] * 4, [0.4] * 4, "not decided"),
    ],
)
def test_a_verdict_needs_its_whole_interval(passed: Any, recorded: Any, decision: str) -> None:
    (found,) = executed([*recorded, *passed], len(passed), 0)["verdicts"]
    assert (found["decision"], found["scores"], found["recorded_scores"]) == (decision, passed, recorded)
    low, high = found["interval"]
    assert -1 <= low <= fmean(passed) - fmean(recorded) <= high <= 1


def test_a_damaged_task_is_counted_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def execute(step: ChosenStep, how: Execution) -> dict[str, object]:
        if step.trace.task_id == "damaged":
            raise InputError("CR0411", "it is damaged.")
        return {"problem": "", "calls": 2, "reproduced": 2, "verdicts": [verdict("better", [1.0], [0.0])]}

    steps = [ChosenStep(Trace("t", "atif", task_id=name), 0, []) for name in ("damaged", "whole", "other")]
    graded = nullcontext((None, {"damaged": "1", "whole": "2"}))
    monkeypatch.setattr(traces_verb, "_graded", lambda *_: graded)
    monkeypatch.setattr(traces_verb, "chosen_backend", lambda _: "")
    monkeypatch.setattr("composer_replication.traces.replay.execute", execute)
    args, room = Namespace(folder=tmp_path, goes_on="t", tries=3, horizon=1), MagicMock()
    found = asyncio.run(traces_verb._execute(args, room, steps))
    assert (found["executed"], found["not_executed"]) == (1, {"CR0411: it is damaged.": 1})
    with pytest.raises(InputError, match="damaged"):
        asyncio.run(traces_verb._execute(args, room, steps[:1]))


@pytest.mark.parametrize(
    ("decision", "chosen"), [("better", "better"), ("worse", "a"), ("not decided", None)]
)
def test_what_the_tests_decided_is_a_pair_and_nothing_else(decision: str, chosen: str | None) -> None:
    trace = session("s", "a", "b")
    scores = ([1.0] * 4, [0.0] * 4) if decision == "better" else ([0.0] * 4, [1.0] * 4)
    row = {"trace_id": "s", "step": 1, "verdicts": [verdict(decision, *scores)]}
    rows = list(executed_pairs({"s": trace}, [row]))
    commands = [row["chosen"][0]["tool_calls"][0]["function"]["arguments"]["command"] for row in rows]
    assert commands == ([] if chosen is None else [chosen])
    for row in rows:
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert (row["source"], row["weight"], row["is_last"]) == ("executed", 1.0, False)


def test_a_verdict_speaks_of_the_session_of_its_own_folder(tmp_path: Path) -> None:
    for name, verdicts in (("a", [verdict("better", [1.0] * 3, [0.0] * 3)]), ("b", [])):
        (folder := tmp_path / name).mkdir()
        (folder / "traces.jsonl").write_bytes(json_bytes(trace_row(session("s", name, "last"))) + b"\n")
        rewrite_jsonl(folder / "verdicts.jsonl", [{"trace_id": "s", "step": 1, "verdicts": verdicts}])
    out = tmp_path / "pairs.jsonl"
    assert main(["traces", "pairs", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]) == 0
    (pair,) = read_pair_rows(out).values()
    assert pair["rejected"][0]["tool_calls"][0]["function"]["arguments"] == {"command": "a"}


def test_stale_verdicts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces.jsonl").write_bytes(json_bytes(trace_row(session("s", "a", "last"))) + b"\n")
    row = {"trace_id": "s", "step": 9, "verdicts": [verdict("better", [1.0] * 3, [0.0] * 3)]}
    rewrite_jsonl(tmp_path / "verdicts.jsonl", [{**row, "trace_id": "gone"}, row])
    assert main(["traces", "pairs", str(tmp_path), "--out", str(tmp_path / "pairs.jsonl")]) != 0
    told = capsys.readouterr().err
    assert "CR0942: verdicts.jsonl speaks of steps" in told and "composer-rl traces replay" in told


def test_siblings_part_at_the_same_state() -> None:
    good, bad = session("good", "look", "right", passed=True), session("bad", "look", "wrong", passed=False)
    (row,) = sibling_pairs([good, bad, session("other", "else", passed=None)])
    assert row["step"] == 2
    assert row["rejected"][0]["tool_calls"][0]["function"]["arguments"] == {"command": "wrong"}
    other_state = session("bad", "look", "wrong", passed=False)
    other_state.steps[1].results[0].text = "something else"
    assert list(sibling_pairs([good, other_state])) == []


def test_a_refused_action_against_the_next_accepted_one() -> None:
    (row,) = objection_pairs([session("s", "rm -rf /", "ls", denied=0)])
    assert row["chosen"][0]["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
    assert row["weight"] < 0.5
    assert list(objection_pairs([session("s", "ls", "rm -rf /", denied=1)])) == []


def test_a_session_with_tools_of_its_own_keeps_their_names_on_every_side() -> None:
    trace = session("s", "rm -rf /", "ls", denied=0)
    trace.task_id, trace.tools = "", [{"type": "function", "function": {"name": "terminal"}}]
    for _, step in trace.agent_steps():
        step.calls = [replace(call, name="terminal") for call in step.calls]
    (row,), _ = balanced(objection_pairs([trace]), lambda _: set())
    assert row["chosen"][0]["tool_calls"][0]["function"]["name"] == "terminal"
    same = assistant_message("", [ToolCall("terminal", '{"command": "ls"}')])
    assert ChosenStep(trace, 2, [], {"t": same}).others == []


def test_pairs_are_dropped_by_reason() -> None:
    good, bad = session("good", "x", passed=True), session("bad", "y", passed=False)
    (pair,) = sibling_pairs([good, bad])
    long = {**pair, "chosen": [{"role": "assistant", "content": "x" * 5000}]}
    same = {**pair, "chosen": pair["rejected"]}
    call = {"id": "c", "function": {"name": "fly", "arguments": {}}}
    foreign = {**pair, "chosen": [{**pair["chosen"][0], "tool_calls": [call]}]}
    lasts = [{**pair, "step": number} for number in range(5, 9)]
    rows, dropped = balanced([pair, pair, long, same, foreign, *lasts], lambda _: set())
    assert len(rows) == 1
    assert dropped == {
        "the same pair twice": 1,
        "one side is many times as long": 1,
        "both sides are the same": 1,
        "a call of a tool that is not offered": 1,
        "a held-out task, or its code in the text": 0,
        "too many pairs of last steps": 4,
    }
    assert balanced([pair], lambda rows: set(range(len(rows))))[0] == []


def test_rows_for_supervised_training_are_passing_attempts_alone() -> None:
    traces = [session("good", "a", "b", passed=True), session("bad", "a", passed=False), session("who", "a")]
    rows, dropped = sft_rows(traces, lambda _: set())
    (row,) = rows
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(row["provenance"])["trace_id"] == "good"
    assert dropped["did not pass its tests"] == dropped["nobody ran its tests"] == 1
