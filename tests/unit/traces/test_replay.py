"""Teachers over real HTTP that refuse, break, hang and die; budgets that hold; a replay that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faulty_http import Fault, hang_up, status
from policy_server import PolicyServer, calls, half_a_chunked_answer, hold, says

from composer_replication.cli.main import main
from composer_replication.records import ToolCall
from composer_replication.traces.ingest import TRACES_NAME
from composer_replication.traces.pairs import ChosenStep, chosen_steps, prompt_of, tools_of
from composer_replication.traces.readers.messages import trace_row
from composer_replication.traces.replay import (
    AnswerStore,
    Classroom,
    open_teacher,
    replay_request,
    replay_steps,
)
from composer_replication.traces.trace_records import StepResult, Trace, TraceStep

WANTED = calls("bash", command="ls")
USAGE = {"prompt_tokens": 100, "completion_tokens": 10}


def session(name: str, num_steps: int = 3) -> Trace:
    """Edits, one after the other; the second fails."""
    trace = Trace(name, "codex", prompt_origin="rebuilt")
    trace.add(TraceStep("user", f"fix {name}"))
    for number in range(num_steps):
        call = ToolCall("Write", json.dumps({"file_path": f"f{number}", "content": "x"}), f"c{number}")
        result = StepResult(call.call_id, "done", is_error=number == 1)
        trace.add(TraceStep("agent", calls=[call], results=[result]))
    return trace


def teacher(message: dict[str, Any]) -> AbstractContextManager[PolicyServer]:
    return PolicyServer.running(lambda _: message, USAGE)


def room(
    path: Path,
    *specs: str,
    dollars: float = 100.0,
    tokens: int = 10**9,
    price: tuple[float, float] = (1.0, 2.0),
    answer_seconds: float = 60.0,
) -> Classroom:
    names = [spec.partition("=")[0] for spec in specs]
    opened = [open_teacher(spec, {}, dict.fromkeys(names, price)) for spec in specs]
    teachers = {teacher.name: teacher for teacher in opened}
    store = AnswerStore(path / "answers.sqlite", max_dollars=dollars, max_tokens=tokens)
    return Classroom(teachers, store, max_tokens=50, answer_seconds=answer_seconds, pause_seconds=0.01)


def replayed(classroom: Classroom, traces: list[Trace], **how: Any) -> tuple[list[ChosenStep], bool]:
    try:
        found = asyncio.run(replay_steps(chosen_steps(traces, 100), classroom, **how))
        return found, classroom.is_spent
    finally:
        classroom.store.close()


def test_steps_that_matter_come_first_and_prompts_have_our_tools() -> None:
    trace = session("a")
    chosen = chosen_steps([trace], 2)
    assert [(step.idx, step.reasons) for step in chosen] == [(2, ["error", "edit"]), (1, ["edit"])]
    messages = prompt_of(trace, 2)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    written = {"name": "write_file", "arguments": {"path": "f0", "content": "x"}}
    assert messages[2]["tool_calls"][0]["function"] == written
    begun = Trace("b", "codex")
    for source in ("system", "system", "user", "agent"):
        begun.add(TraceStep(source, "§"))
    begun.prompt_origin = "rebuilt"  # their tools were not recorded: a template takes one system message
    assert [(m["role"], m["content"].count("§")) for m in prompt_of(begun, 3)] == [("system", 2), ("user", 1)]


def test_what_goes_wrong_is_asked_again_and_nothing_is_paid_twice(tmp_path: Path) -> None:
    with teacher(WANTED) as server:
        (twins := tmp_path / "twins").mkdir()
        replayed(room(twins, server.spec("good")), [session("a"), session("a")])
        assert max(server.given.values()) == 1  # attempts at one task begin with the same request
    with teacher(WANTED) as server:
        undisturbed, _ = replayed(room(tmp_path, server.spec("good")), [session("a"), session("b")])
        assert sum(server.given.values()) == 6
    with teacher(WANTED) as server:
        server.faults = [
            Fault("POST", status(429, "slow down", {"Retry-After": "0.05"})),
            Fault("POST", status(500, "oops")),
            Fault("POST", hang_up),
            Fault("POST", lambda handler: handler.say(200, {"choices": "none"})),
            Fault("POST", half_a_chunked_answer),
        ]
        disturbed = tmp_path / "disturbed"
        disturbed.mkdir()
        classroom = room(disturbed, server.spec("good"))
        found, is_spent = replayed(classroom, [session("a"), session("b")])
        assert [each.answers for each in found] == [each.answers for each in undisturbed]
        assert not is_spent
        assert max(server.given.values()) == 1
        counts = classroom.teachers["good"].counts
        assert {"http-429", "http-500", "not-an-answer"} <= set(counts)
        again, num_seen = room(disturbed, server.spec("good")), len(server.seen)
        repeated, _ = replayed(again, [session("a"), session("b")])
        assert [each.answers for each in repeated] == [each.answers for each in found]
        assert len(server.seen) == num_seen
        assert again.teachers["good"].counts == {"cached": 6}


def test_a_hanging_answer_is_cut(tmp_path: Path) -> None:
    with teacher(WANTED) as server:
        server.faults = [Fault("POST", hold)]
        started = time.monotonic()
        found, _ = replayed(room(tmp_path, server.spec("slow"), answer_seconds=2.0), [session("a", 1)])
        assert found[0].answers["slow"] is not None
        assert time.monotonic() - started < 29  # the fault holds its answer back for 30 seconds


def test_a_dead_teacher_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    with teacher(WANTED) as good, teacher(says("x")) as locked, teacher(says("x")) as later:
        locked.faults = [Fault("POST", status(401, "no key"), times=1000)]
        later.faults = [Fault("POST", status(429, "tomorrow", {"Retry-After": "86400"}), times=1000)]
        dead = "dead=http://127.0.0.1:9/v1#dead"
        classroom = room(tmp_path, locked.spec("locked"), dead, later.spec("later"), good.spec("good"))
        found, _ = replayed(classroom, [session("a"), session("b")])
        assert classroom.teachers["locked"].left_out == "it refuses every request (http-401)"
        assert classroom.teachers["later"].left_out == "it wants to be asked in 86400 seconds (http-429)"
        assert "3 requests in a row" in classroom.teachers["dead"].left_out
        assert not classroom.teachers["good"].left_out
        assert [each.answers["good"] is not None for each in found] == [True] * 6
        assert [each.answers["locked"] for each in found] == [None] * 6


def test_a_cheap_teacher_first_spares_the_others_where_it_agrees(tmp_path: Path) -> None:
    trace = Trace("a", "codex", prompt_origin="rebuilt")
    for source, said in (("user", "go"), ("agent", "one"), ("user", "on"), ("agent", "two")):
        trace.add(TraceStep(source, said))
    with teacher(says("one")) as cheap, teacher(says("three")) as dear:
        classroom = room(tmp_path, cheap.spec("cheap"), dear.spec("dear"))
        chosen = chosen_steps([trace], 100, takes_all=True)
        (step,) = asyncio.run(replay_steps(chosen, classroom, first="cheap"))
    assert (step.idx, step.reasons) == (3, ["disagreement"])
    assert [name for name, _ in step.others] == ["cheap", "dear"]
    assert {name: each.num_answered for name, each in classroom.teachers.items()} == {"cheap": 2, "dear": 1}
    classroom.store.close()


@pytest.mark.parametrize("limit", ["dollars", "tokens"])
def test_the_budget_is_never_passed(tmp_path: Path, limit: str) -> None:
    with teacher(WANTED) as server:
        server.usage = {"prompt_tokens": 1000, "completion_tokens": 40}
        free = room(tmp_path / ".", server.spec("t"))
        request = free.request(prompt_of(session("a"), 3), tools_of(session("a")))
        most = free.most(free.teachers["t"], request)
        free.store.close()
        budget = {"dollars": 1.5 * most[0]} if limit == "dollars" else {"tokens": int(1.5 * most[1])}
        other = tmp_path / limit
        other.mkdir()
        classroom = room(other, server.spec("t"), **budget)
        found, is_spent = replayed(classroom, [session("a", 9), session("b", 9)])
        assert is_spent
        assert 0 < sum(server.given.values()) < len(found)
        store = AnswerStore(other / "answers.sqlite", max_dollars=0, max_tokens=0)
        dollars, tokens = store.spent()
        assert dollars <= budget.get("dollars", 1e9)
        assert tokens <= budget.get("tokens", 10**9)


def test_a_dry_run_is_an_upper_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with teacher(WANTED) as server:
        classroom = room(tmp_path, server.spec("t"))
        chosen = chosen_steps([session("a")], 100)
        most = classroom.cost(replay_request(classroom, step) for step in chosen)
        (folder := tmp_path / "folder").mkdir()
        bound = json.dumps(trace_row(replace(session("a"), task_id="task")))
        (folder / TRACES_NAME).write_text(f"{bound}\n{json.dumps(trace_row(session('b')))}\n")
        words = ["--teacher", server.spec("t"), "--tasks", "x", "--tries", "3", "--horizon", "5", "--json"]
        assert main(["traces", "replay", str(folder), *words, "--dry-run"]) == 0
        # three steps of the session on a task, the recorded side of each and that of the teacher
        assert json.loads(capsys.readouterr().out)["most_continuations"] == 3 * 2 * 3 * 5
        assert not server.seen
        assert (most["steps"], most["calls"]) == (3, 3)
        replayed(classroom, [session("a")])
        store = AnswerStore(tmp_path / "answers.sqlite", max_dollars=0, max_tokens=0)
        assert store.spent()[0] <= most["most_dollars"]


def test_a_reservation_that_nobody_settled_counts_as_spent(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "a", max_dollars=1.0, max_tokens=100)
    assert store.reserve("k", 0.75, 10) is not None
    assert store.reserve("k", 0.5, 10) is None
    store.close()
    again = AnswerStore(tmp_path / "a", max_dollars=1.0, max_tokens=100)
    assert again.spent() == (0.75, 10)
    assert again.reserve("k", 0.5, 10) is None
    charge = again.reserve("k", 0.25, 10)
    assert charge is not None
    again.free(charge)
    assert again.spent() == (0.75, 10)


@pytest.mark.parametrize(("budget", "code"), [(10**7, 0), (45_000, 6)])
def test_a_killed_replay_goes_on_to_the_same_result(tmp_path: Path, budget: int, code: int) -> None:
    traces = [session(f"s{number}", 4) for number in range(6)]
    folder, plain = tmp_path / "killed", tmp_path / "plain"
    for each in (folder, plain):
        each.mkdir()
        (each / TRACES_NAME).write_text("".join(json.dumps(trace_row(trace)) + "\n" for trace in traces))

    def slowly(_: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.05)
        return WANTED

    usage = {"prompt_tokens": 2000, "completion_tokens": 40}  # 24 times that is more than the small budget
    with PolicyServer.running(slowly, usage) as server:
        options = ["--price", "t=1/2", "--concurrent", "2", "--quiet", "--max-tokens", str(budget)]
        words = ["traces", "replay", str(folder), "--teacher", server.spec("t"), *options]
        command = [sys.executable, "-m", "composer_replication.cli.main", *words]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
        while sum(server.given.values()) < 4 and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert main(words) == code
        spent = AnswerStore(folder / "answers.sqlite", max_dollars=0, max_tokens=0).spent()[1]
        assert server.given.total() * sum(usage.values()) <= spent <= budget  # by the server's own count
        if code:
            return
        assert main([*words[:2], str(plain), *words[3:]]) == 0
        assert (folder / "replay.jsonl").read_text() == (plain / "replay.jsonl").read_text()
        twice = sum(number - 2 for number in server.given.values() if number > 2)  # once in each folder
        assert twice <= 2  # two requests at a time: they alone were answered and not kept
        assert len(server.given) == 24


def test_bad_teachers_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / TRACES_NAME).write_text(json.dumps(trace_row(session("a"))) + "\n")
    begin, good = ["traces", "replay", str(tmp_path), "--quiet", "--teacher"], "a=http://127.0.0.1:9/v1#m"
    for words, code, sentence in (
        (["a"], 2, "CR0944: a teacher cannot be asked"),
        ([good, "--key", "a=NO_SUCH_VARIABLE"], 2, "CR0944"),
        ([good, "--key", "a"], 2, "CR0206: argument --key: 'a' is not NAME=…"),
        ([good, "--price", "b=1/2"], 2, "CR0206: there is no teacher 'b'"),
        ([good, "--price", "a=cheap"], 2, "CR0206"),
        ([good, "--tries", "2"], 2, "CR0206: argument --tries"),
    ):
        assert main([*begin, *words]) == code
        assert sentence in capsys.readouterr().err
