"""Every format from real files: counts are pinned, and compared with a count that knows no format, or with one by hand."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atif
import pytest

from composer_replication.errors import InputError
from composer_replication.traces.ingest import FORMATS, Redactor, detect, find_units, read_records
from composer_replication.traces.json_values import json_bytes, json_value
from composer_replication.traces.readers.messages import read_atif, step_chain, trace_row
from composer_replication.traces.trace_records import Ledger, Trace

DATA = Path(__file__).parents[2] / "data" / "traces"
TABLE = tomllib.loads((DATA / "counts.toml").read_text())
BY_IDS, COUNTS = TABLE["by_ids"], TABLE["by_ids"] | TABLE["by_hand"]


def files_of(name: str) -> list[Path]:
    return [DATA / name] if (DATA / name).is_file() else sorted((DATA / name).rglob("*.json"))


def traces_of(path: Path) -> tuple[list[Trace], Ledger]:
    ledger, found = Ledger(), list[Trace]()
    for unit in find_units([path])[0]:
        records = (record for each in unit.paths for record in read_records(each, ledger))
        found += FORMATS[unit.kind](records, ledger, unit.paths[0].stem)
    return found, ledger


@pytest.mark.parametrize("name", COUNTS)
def test_a_file_is_read_as_it_was_counted(name: str) -> None:
    assert [" ".join(fit) for fit in detect(files_of(name)[0])] == [COUNTS[name]["kind"]]
    traces, ledger = traces_of(DATA / name)
    assert [[*trace.counts] for trace in traces] == COUNTS[name]["counts"]
    assert ledger.is_balanced
    assert ledger.counts["mapped"] > 0 == ledger.counts["dropped: a record of another shape"]


_CALL_IDS = {"tool_use": "id", "function": "id", "tool_call": "id"} | dict.fromkeys(
    ("function_call", "custom_tool_call", "local_shell_call", "tool_search_call"), "call_id"
)
_RESULT_IDS = {"tool_result": "tool_use_id", "tool_call_response": "id"} | dict.fromkeys(
    ("function_call_output", "custom_tool_call_output", "tool_search_output"), "call_id"
)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object inside, also inside texts of JSON."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            return
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(each)


def ids_in(record: Any) -> Iterator[tuple[str, Any]]:
    """Ids of calls and of results, wherever they stand: this knows nothing of order, conversations or versions."""
    for row in objects(record):
        kind = row.get("type") if isinstance(row.get("type"), str) else ""
        yield "call", row.get(_CALL_IDS.get(kind, ""))
        yield "result", row.get(_RESULT_IDS.get(kind, ""))
        yield from (("call", c.get("id") or c.get("tool_call_id")) for c in row.get("tool_calls") or ())
        if row.get("role") == "tool" or str(row.get("kind")).endswith(("Event", "Observation")):
            yield "call" if row.get("kind") == "ActionEvent" else "result", row.get("tool_call_id")
        yield "result", row.get("source_call_id")
        yield from (("result", each) for each in row.get("tool_call_ids") or ())
        if row.get("key") == "gen_ai.tool.call.id":
            yield from (("call", row["value"]["stringValue"]), ("result", row["value"]["stringValue"]))


@pytest.mark.parametrize("name", BY_IDS)
def test_calls_and_results_against_a_count_that_knows_no_format(name: str) -> None:
    counts = [sum(column) for column in zip(*COUNTS[name]["counts"], strict=True)]
    ids: dict[str, set[Any]] = {"call": set(), "result": set()}
    for record in (record for path in files_of(name) for record in read_records(path, Ledger())):
        for what, found in ids_in(record):
            if isinstance(found, str) and found:
                ids[what].add(found)
    assert counts[1:3] == [len(ids["call"]), len(ids["call"] & ids["result"])]


@pytest.mark.parametrize(
    "name", [name for name in COUNTS if name.startswith(("claude-code/s", "atif", "openhands-v1"))]
)
def test_answers_against_a_count_of_their_ids(name: str) -> None:
    """One ``message.id``, one step of the source ``agent``, one ``llm_response_id`` is one answer."""
    answers: set[str] = set()
    records = (record for path in files_of(name) for record in read_records(path, Ledger()))
    for row in (row for record in records for row in objects(record)):
        is_answer = "step_id" in row or row.get("kind") in ("ActionEvent", "MessageEvent")
        if row.get("type") == "assistant":
            answers.add(row["message"]["id"])
        elif row.get("source") == "agent" and is_answer:
            answers.add(row.get("llm_response_id") or row.get("id") or f"step {len(answers)}")
    assert len(answers) == sum(count[0] for count in COUNTS[name]["counts"])


def test_gemini_replaces_and_takes_back_messages(tmp_path: Path) -> None:
    """A later line with an id is the newer state of that message; ``$rewindTo`` takes it and all after it back."""
    source = (DATA / "gemini-cli" / "session-0.40.jsonl").read_text().splitlines()
    said = [
        {"id": name, "type": "gemini", "content": text} for name, text in (("a", "1"), ("b", "2"), ("a", "3"))
    ]
    lines = [*map(json.dumps, said), json.dumps({"$rewindTo": "b"})]
    cancelled = json.loads(source[3])
    cancelled |= {"id": "c"}
    cancelled["toolCalls"][0] |= {"id": "second", "status": "cancelled"}
    path = tmp_path / "session.jsonl"
    path.write_text("\n".join([*source, *lines, json.dumps(cancelled)]))
    traces, ledger = traces_of(path)
    texts = [step.text for _, step in traces[0].agent_steps()]
    assert texts == ["", "Hello! I listed the files.", "3", ""]
    assert traces[0].steps[-1].flags == {"denied"}
    assert traces[0].counts == (4, 2, 2, 1)
    assert ledger.is_balanced
    assert ledger.counts["kept: messages that were taken back"] == 1
    path.write_text("\n".join([*source, json.dumps({"$rewindTo": "nobody"}), json.dumps(said[0])]))
    assert [step.text for step in traces_of(path)[0][0].steps] == ["1"]


def test_openhands_0_knows_its_prompt_its_exit_codes_and_parallel_calls(tmp_path: Path) -> None:
    (trace,), _ = traces_of(DATA / "openhands-v0" / "harbor-rfc-openhands-trajectory.json")
    assert trace.prompt_origin == "recorded"
    assert {"execute_bash", "str_replace_editor"} <= {tool["function"]["name"] for tool in trace.tools}
    events = json.loads((DATA / "openhands-v0" / "wrong_initial_state.json").read_text())
    action, seen = events[3], events[4]
    response = action["tool_call_metadata"]["model_response"]
    first = response["choices"][0]["message"]["tool_calls"][0]
    response["choices"][0]["message"]["tool_calls"].append({**first, "id": "second"})
    again = json.loads(json.dumps(action))
    again["tool_call_metadata"]["tool_call_id"] = "second"
    seen["extras"]["metadata"]["exit_code"] = 2
    broken = {**json.loads(json.dumps(seen)), "observation": "error", "content": "no such tool", "extras": {}}
    broken["tool_call_metadata"]["tool_call_id"] = "second"
    path = tmp_path / "events.json"
    path.write_text(json.dumps([*events[:3], action, again, seen, broken]))
    (trace,), ledger = traces_of(path)
    assert trace.counts == (2, 3, 3, 2)
    assert [(r.call_id == "second", r.exit_code, r.is_error) for r in trace.steps[-1].results] == [
        (False, 2, None), (True, None, True),
    ]  # fmt: skip
    assert ledger.counts["kept: another call of an answer"] == 1


def test_a_line_of_two_records_is_two_records() -> None:
    path = DATA / "claude-code" / "session-2.1.7-and-2.1.12.jsonl"
    ledger = Ledger()
    assert len(list(read_records(path, ledger))) == len(path.read_bytes().splitlines()) + 1
    assert not ledger.counts


def test_a_compaction_begins_a_context_of_its_own() -> None:
    (trace,) = traces_of(DATA / "claude-code" / "session-2.1.14-compacted.jsonl")[0]
    (summary,) = [idx for idx, step in enumerate(trace.steps) if "compacted" in step.flags]
    assert trace.steps[summary].parent == -1
    after = next(idx for idx, _ in trace.agent_steps() if idx > summary)
    assert trace.path_to(after)[0] == summary
    before = max(idx for idx, _ in trace.agent_steps() if idx < summary)
    assert summary not in trace.path_to(before)


def test_a_sub_agent_knows_who_called_it() -> None:
    session, agent = traces_of(DATA / "claude-code" / "session-2.1.39-progress.jsonl")[0]
    assert agent.parent is not None
    assert agent.parent[0] == session.trace_id
    assert agent.parent[1] in {call.call_id for _, step in session.agent_steps() for call in step.calls}


def test_only_the_program_s_own_words_say_that_the_user_stopped_an_answer(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "I look."}
    stopped = [{"type": "text", "text": "No."}, {"type": "text", "text": "[Request interrupted by user]"}]
    for said, flags in ((stopped, {"interrupted"}), ("It says:\n[Request interrupted by user]", set())):
        messages = [("a", "assistant", answer), ("b", "user", {"role": "user", "content": said})]
        own = {"sessionId": "s", "version": "2.1.39"}
        rows = [{**own, "type": kind, "uuid": uuid, "message": message} for uuid, kind, message in messages]
        (tmp_path / "session.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (trace,) = traces_of(tmp_path / "session.jsonl")[0]
        assert trace.steps[0].flags == flags


def test_codex_knows_its_commit_and_keeps_encrypted_thoughts_apart() -> None:
    (trace,) = traces_of(DATA / "codex" / "rollout-0.169.0.jsonl")[0]
    assert trace.commit == "78e8f408d4a5521996c75a882eb6029dcda8929a"
    assert trace.prompt_origin == "rebuilt"
    first = next(step for _, step in trace.agent_steps())
    assert first.sealed == ["gAAAAABmockmockmock"]
    assert b'"sealed":["gAAAAABmockmockmock"]' in json_bytes(trace_row(trace))
    assert first.reasoning == "**Looking at the failing test**"
    assert [call.name for call in first.calls] == ["exec_command", "exec_command"]


def told(trace: Trace) -> list[str]:
    """A line for each step."""
    rows = []
    for step in trace.steps:
        calls = [f" {call.name}{call.arguments}" for call in step.calls]
        results = [f" -> {each.text} ({each.exit_code})" for each in step.results]
        said = f"{step.parent} {step.source}: {step.text}"
        rows.append("".join([said, *calls, *results, *(f" [{flag}]" for flag in sorted(step.flags))]))
    return rows


@pytest.mark.parametrize("case", tomllib.loads((DATA / "overlooked.toml").read_text())["cases"])
def test_what_stands_where_it_is_easily_overlooked(tmp_path: Path, case: dict[str, Any]) -> None:
    (tmp_path / case["file"]).write_text(case["text"])
    traces, ledger = traces_of(tmp_path / case["file"])
    assert [told(trace) for trace in traces] == case["steps"]
    assert (ledger.counts, ledger.is_balanced) == (case["became"], True)
    assert [why for trace in traces for why in trace.lost] == case["lost"]


def test_rows_of_one_conversation_are_joined() -> None:
    (trace,) = traces_of(DATA / "openai-chat" / "openhands-completions")[0]
    assert trace.prompt_origin == "recorded"
    assert [step.source for step in trace.steps[:3]] == ["system", "user", "agent"]
    assert sum(step.source == "system" for step in trace.steps) == 1
    assert {tool["function"]["name"] for tool in trace.tools} >= {"terminal", "finish"}


def test_a_row_that_comes_twice_or_shows_a_result_late_is_of_the_same_conversation(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1, "b": 2}'}}
    again = {**call, "function": {"name": "ls", "arguments": '{"b":2,"a":1}'}}
    chat = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    broken = [{"role": "tool", "tool_call_id": 3, "content": "out"}, {"role": "user", "content": "go on"}]
    whole = [{"role": "tool", "tool_call_id": "c", "content": "out"}, broken[1]]
    rows = [chat, [*chat, *broken], [*chat, *broken], [chat[0], {**chat[1], "tool_calls": [again]}, *whole]]
    end = {"choices": [{"message": {"role": "assistant", "content": "done"}}]}
    logged = [{"messages": row, "response": None} for row in rows] + [{"messages": rows[-1], "response": end}]
    (trace,), ledger = traces_of_rows(tmp_path, *logged)
    assert [step.text for step in trace.steps] == ["begin", "", "go on", "done"]
    assert [result.text for result in trace.steps[1].results] == ["out"]
    assert ledger.is_balanced


def test_calls_of_chats_of_2023_are_read(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "ls", "arguments": "{}"}}
    rest = [
        {"role": "function", "id": "message-3", "name": "ls", "content": "a.py"},
        {"role": "assistant", "content": "so"},
    ]
    (trace,), _ = traces_of_rows(tmp_path, {"messages": [{"role": "user", "content": "hi"}, called, *rest]})
    assert trace.counts == (2, 1, 1, 0)


SAID = [{"type": "message", "role": "assistant", "content": text} for text in ("one", "two")]
CALLED = {"type": "function_call", "name": "ls", "arguments": "{}", "call_id": "c"}
THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
LOOK = {"type": "mcp_call", "id": "m", "name": "look", "output": "long text"}
SEARCH = {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}}


@pytest.mark.parametrize(
    "answers",
    [
        [[(SAID[0], SAID[0])], [(CALLED, CALLED)]],  # two answers, which the next row has as items in a row
        [[(SAID[0], SAID[0])], [(SAID[1], SAID[1])]],
        [[(THOUGHT, None)], [(SAID[0], SAID[0])]],  # a thought that is left out
        [[(SEARCH, {**SEARCH, "action": None})]],  # the server's own tools lose what they did, or their result is cut
        [[(LOOK, {**LOOK, "output": "long ..."})]],
    ],
)  # fmt: skip
def test_answers_of_responses_are_joined_however_the_next_row_repeats_them(
    tmp_path: Path, answers: list[list[tuple[Any, Any]]]
) -> None:
    sent: list[Any] = [{"role": "user", "content": "begin"}]
    rows = []
    for answer in [*answers, [(SAID[1], None)]]:
        output = [said for said, _ in answer]
        rows.append({"request": {"model": "m", "input": [*sent]}, "response": {"output": output}})
        sent += [again for _, again in answer if again is not None]
    (trace,), ledger = traces_of_rows(tmp_path, *rows)
    assert [step.source for step in trace.steps] == ["user", *["agent"] * len(rows)]
    assert ledger.is_balanced


def test_a_result_that_is_one_part_and_no_list_is_its_text(tmp_path: Path) -> None:
    shown = {"type": "function_call_output", "call_id": "c", "output": {"type": "input_text", "text": "out"}}
    items = [{"type": "response_item", "payload": item} for item in (CALLED, shown)]
    (trace,), _ = traces_of_rows(tmp_path, {"type": "session_meta", "payload": {"id": "s"}}, *items)
    assert [result.text for result in trace.steps[0].results] == ["out"]


def test_conversations_with_the_same_calls_and_other_results_are_not_mixed(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    begin = [{"role": "user", "content": "begin"}, answer]

    def logged(result: str, *texts: str) -> dict[str, Any]:
        more = [message for text in texts for message in (answer, {"role": "user", "content": text})]
        return {"messages": [*begin, {"role": "tool", "tool_call_id": "c", "content": result}, *more]}

    rows = [{"messages": begin}] * 2 + [logged("one"), logged("two"), logged("two", "x"), logged("one", "x")]
    traces, _ = traces_of_rows(tmp_path, *rows)
    found = [(trace.steps[1].results[0].text, len(trace.steps)) for trace in traces]
    assert found == [("one", 4), ("two", 4)]


def test_a_row_of_an_evaluation_knows_its_task_and_outcome(tmp_path: Path) -> None:
    events = [json.loads(file.read_text()) for file in files_of("openhands-v1/simple_echo_hello_world")]
    row = {"instance_id": "task-1", "history": events, "test_result": {"report": {"resolved": True}}}
    path = tmp_path / "output.jsonl"
    path.write_text(json.dumps({**row, "instance": {"repo": "a/b", "base_commit": "c0ffee"}}))
    assert detect(path) == [("openhands", "evaluation")]
    (trace,), ledger = traces_of(path)
    assert (trace.counts, trace.passed, ledger.is_balanced) == ((2, 1, 1, 0), True, True)
    assert (trace.task_id, trace.repository, trace.commit) == ("task-1", "a/b", "c0ffee")


def test_copied_context_and_demonstrations_are_flagged() -> None:
    path = DATA / "atif" / "hello-world-context-summarization-linear-history.trajectory.cont-1.json"
    (trace,) = traces_of(path)[0]
    written = json.loads(path.read_text())["steps"]
    copied = ["is_copied_context" in step for step in written]
    assert ["copied" in step.flags for step in trace.steps] == copied
    (demo,) = traces_of(DATA / "swe-agent" / "pydicom-1458-v0.traj")[0]
    assert [idx for idx, step in enumerate(demo.steps) if "demo" in step.flags] == [1]


@pytest.mark.parametrize("name", ["v2.4.6-text.traj.json", "v2.4.6-tool-calls.traj.json"])
def test_a_format_error_keeps_the_answer_that_was_taken_out(name: str) -> None:
    (trace,) = traces_of(DATA / "mini-swe-agent" / name)[0]
    without = [step.text for _, step in trace.agent_steps() if not step.calls]
    assert without == ["The function looks wrong, it subtracts."]


def test_what_is_written_is_read_back_and_valid_for_the_public_models() -> None:
    traces, _ = traces_of(DATA)
    assert len(traces) > 40
    for trace in traces:
        row = json.loads(json.dumps(trace_row(trace)))
        (again,) = read_atif(iter([row]), Ledger(), "")
        assert trace_row(again) == trace_row(trace)
        if trace.counts[0]:
            atif.Trajectory.model_validate(row)


@pytest.mark.parametrize("key", "type kind role schema_version history messages info observations".split())
@pytest.mark.parametrize("value", [[], {"a": 1}, [None], 3, [[]]])
def test_a_first_line_of_another_shape_is_of_no_known_format(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({key: value}))
    assert detect(path) == detect(DATA / "openhands-v1" / "base_state-1.11.5.json") == []


def test_two_formats_in_one_file_are_named(tmp_path: Path) -> None:
    codex = (DATA / "codex" / "letta-tool-calls.jsonl").read_text()
    claude = (DATA / "claude-code" / "subagent" / "agent_session.jsonl").read_text()
    path = tmp_path / "mixed.jsonl"
    path.write_text(codex + claude)
    with pytest.raises(InputError, match=r"CR0206.*claude-code 2\.0\.76 and codex unknown"):
        find_units([path])
    units, left_out = find_units([tmp_path])
    assert not units
    assert left_out["two formats fit (CR0206)"] == 1
    assert [unit.kind for unit in find_units([path], "codex")[0]] == ["codex"]


def traces_of_rows(tmp_path: Path, *rows: object, end: str = "\n") -> tuple[list[Trace], Ledger]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + end for row in rows))
    return traces_of(path)


def test_a_result_without_an_id_beside_words_answers_the_call_before(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    content = [{"type": "tool_result", "content": "out"}, {"type": "text", "text": "go on"}]
    chat = [{"role": "user", "content": "begin"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (trace,), _ = traces_of_rows(tmp_path, {"messages": [*chat, {"role": "user", "content": content}]})
    assert [result.text for result in trace.steps[1].results] == ["out"]
    assert trace.steps[2].text == "go on"


def test_a_compaction_is_no_part_of_the_answer_before(tmp_path: Path) -> None:
    def item(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    meta = {"type": "session_meta", "payload": {"id": "s", "cli_version": "1"}}
    items = (item("user", "begin"), item("assistant", "yes"))
    said = [{"type": "response_item", "payload": each} for each in items]
    history = {"message": "in short", "replacement_history": [item("assistant", "yes")]}
    (trace,), _ = traces_of_rows(tmp_path, meta, *said, {"type": "compacted", "payload": history})
    assert [(step.text, step.parent) for step in trace.steps[-2:]] == [("yes", 0), ("yes", -1)]
    assert not trace.steps[1].flags and trace.steps[2].flags == {"compacted", "copied"}


def test_thousands_of_damaged_records() -> None:
    """Wrong types, missing keys, repeated and self-referring ids: no exception, and every record is counted."""
    rng, number = random.Random(0), 0
    while number < 3500:
        for unit in find_units([DATA])[0]:
            intact = (record for path in unit.paths for record in read_records(path, Ledger()))
            records = [json_value(json.dumps(damaged(record, rng)).encode()) for record in intact]
            records = [r for r in records if isinstance(r, dict | list)]
            ledger = Ledger()
            ledger.num_records = len(records)
            for trace in FORMATS[unit.kind](iter(records), ledger, "damaged"):
                row = json.loads(json_bytes(trace_row(trace, Redactor().value)))
                (again,) = read_atif(iter([row]), Ledger(), "")
                assert len(step_chain(again.steps)) == len(trace.steps)
                assert all(-1 <= step.parent < idx for idx, step in enumerate(trace.steps))
                if trace.counts[0]:
                    atif.Trajectory.model_validate(row)
            assert ledger.is_balanced, unit.kind
            number += len(records)


def test_cut_joined_and_cyclic_lines(tmp_path: Path) -> None:
    rng = random.Random(0)
    source = (DATA / "claude-code" / "session-2.1.39-progress.jsonl").read_bytes().splitlines()
    cyclic = [
        {**json.loads(line), "parentUuid": json.loads(source[-1])["uuid"], "uuid": f"{n}"}
        for n, line in enumerate(source[5:25])
    ]
    lines = [json.dumps(each).encode() for each in cyclic]
    for line in source * 3:
        cut = rng.randrange(len(line))
        lines += [line[:cut], line[cut:], line + line, b"\xff" + line[cut:], b"null", b"[]"]
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"\n".join([source[5], *lines]))
    traces, ledger = traces_of(path)
    assert traces
    assert ledger.is_balanced
    assert ledger.counts["dropped: damaged JSON"] > 300
    assert ledger.counts["dropped: a line that is no object"] >= 2 * 3 * len(source)


def damaged(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.03:
        return rng.choice([None, True, 3, -1.5, "x", [], {}, [1], {"a": 1}, "\ud800", [[]], [None]])
    if isinstance(value, dict):
        return {key: damaged(each, rng) for key, each in value.items() if rng.random() > 0.02}
    if isinstance(value, list):
        return [damaged(each, rng) for each in value if rng.random() > 0.02]
    return value
