"""What is taken out, what is held twice, what the verb says, and what it refuses."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import main
from composer_replication.errors import InputError
from composer_replication.records import ToolCall
from composer_replication.traces import ingest as ingest_module
from composer_replication.traces.ingest import Redactor, duplicates, ingest, minhash, read_traces
from composer_replication.traces.json_values import json_bytes, json_text
from composer_replication.traces.pairs import our_call
from composer_replication.traces.readers.messages import step_chain, trace_row
from composer_replication.traces.replay import AnswerStore
from composer_replication.traces.trace_records import StepResult, Trace, TraceStep

DATA = Path(__file__).parents[2] / "data" / "traces"
SECRETS = {
    "anthropic": "sk-ant-api03-" + "Ab3_" * 12,
    "openai": "sk-proj-" + "Ab3d" * 10,
    "github": "ghp_" + "Ab3d" * 9,
    "gitlab": "glpat-" + "Ab3d" * 6,
    "aws-id": "AKIA" + "ABCD2345EFGH6789",
    "google": "AIza" + "Sy3dE" * 7,
    "slack": "xoxb-123456789012-abcdefghij",
    "hugging-face": "hf_" + "abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "stripe": "sk_live_" + "4eC39HqLyjWDarjt",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "private-key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
    "e-mail": "jane.doe+x@corp.example.org",
    "home-folder": "janedoe42",
}


def test_secrets_go_and_placeholders_are_stable() -> None:
    text = "\n".join(f"here {value} end" for name, value in SECRETS.items() if name != "home-folder")
    text += "\ncat /Users/janedoe42/repo/a.py /home/janedoe42/b /.claude/projects/-Users-janedoe42-r 'password': \"hunter2hunter2\" https://bob:pa55word99@host/x"
    redactor = Redactor()
    trace = Trace("t", "codex", model="/home/janedoe42/m", tools=[{"description": text}])
    command = json_text({"command": f"\n{text}", "joe@corp.example.com": "a\tb", "password": "pa55word99xyz"})
    call, result = ToolCall("bash", command, "c"), StepResult("c", text)
    trace.add(TraceStep("agent", text, reasoning=text, calls=[call], results=[result]))
    row = trace_row(trace, redactor.value)
    (step,) = row["steps"]
    written = json_bytes(row).decode()
    for value in (*SECRETS.values(), "hunter2hunter2", "pa55word99", "joe@corp"):
        assert value not in written, value
    assert {*SECRETS, "assigned", "url-password"} <= set(redactor.counts)
    assert "/Users/user-1/repo/a.py /home/user-1/b" in step["message"] == step["reasoning_content"]
    assert "/.claude/projects/-Users-user-1-r" in step["message"]
    assert step["observation"]["results"][0]["content"] == step["message"]
    assert step["tool_calls"][0]["arguments"]["command"] == f"\n{step['message']}"
    assert step["tool_calls"][0]["arguments"]["password"] == "REDACTED_key_14"
    assert redactor.values["user-1"] == "janedoe42"
    assert redactor.value(row) == row
    assert redactor.text(SECRETS["openai"]) == redactor.text(SECRETS["openai"]) != SECRETS["openai"]


def test_half_a_pair_of_surrogates_hides_no_secret(tmp_path: Path) -> None:
    lines = (DATA / "claude-code" / "subagent" / "agent_session.jsonl").read_text().splitlines()
    answer = json.loads(next(line for line in lines if '"assistant"' in line))
    answer |= {"uuid": "u1", "message": answer["message"] | {"id": "m1", "content": "cut \ud83d KEY"}}
    text = json.dumps(answer).replace("KEY", SECRETS["github"])
    joined = text + text.replace("u1", "u2").replace("m1", "m2")
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, joined]))
    result = ingest([tmp_path / "in.jsonl"], tmp_path / "out")
    assert result["redactions"]["github"] == 2
    assert SECRETS["github"] not in (tmp_path / "out" / "traces.jsonl").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "git@github.com:a/b.git",
        "sha 9f86d081884c7d659a2feaa0c55ad015",
        "@pytest.mark.skip",
        "a task-sk-1 x",
        "token = next_token",
        "/usr/home --home-dir a-Users-b",
        'password = "see the manual page"',
        "decorators @functools.cache and user@localhost",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


def test_a_key_that_names_a_secret_may_hold_a_name_itself() -> None:
    found = Redactor().value({"/home/alice/API_KEY": "abcdefgh12345678", "/home/al/b_token": "no secret"})
    assert found == {"/home/user-1/API_KEY": "REDACTED_key_1", "/home/user-2/b_token": "no secret"}


def said(name: str, *texts: str) -> Trace:
    trace = Trace(name, "codex")
    trace.add(TraceStep("user", "begin"))
    for text in texts:
        trace.add(TraceStep("agent", text))
    return trace


def test_beginnings_and_copies_are_left_out() -> None:
    texts = {"short": "ab", "long": "abc", "again": "abc", "other": "x"}
    traces = [said(name, *letters) for name, letters in texts.items()]
    chains = [step_chain(trace.steps) for trace in traces]
    assert duplicates(chains, [None] * 4) == {0: "the beginning of another", 2: "the same"}


def test_nearly_the_same_is_found_and_another_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"word{number}" for number in range(400)]
    first, near = said("a", " ".join(words)), said("b", " ".join([*words[:-1], "else", "here"]))
    far = said("c", " ".join(f"other{number}" for number in range(400)))
    traces = [first, near, far]
    hashes = [minhash(trace) for trace in traces]
    assert duplicates([step_chain(trace.steps) for trace in traces], hashes) == {1: "nearly the same"}
    monkeypatch.setattr(ingest_module, "rensa", None)
    assert minhash(first) is None


def test_everything_is_counted_and_the_map_stays_private(tmp_path: Path) -> None:
    result = ingest([DATA], tmp_path, num_processes=2)
    assert result["is_balanced"]
    assert sum(result["became"].values()) == result["records"]
    assert result["became"]["dropped: a message of the kind 'mcp_list_tools'"] == 1  # inside a mapped row
    assert result["traces"] == sum(1 for _ in read_traces(tmp_path)) > 30
    assert stat.S_IMODE((tmp_path / "redactions.local.json").stat().st_mode) == 0o600
    assert "redactions.local.json" in (tmp_path / ".gitignore").read_text()
    assert json.loads((tmp_path / "ingest.json").read_text())["records"] == result["records"]
    assert not list(tmp_path.glob("parts-*"))
    ingest([DATA], alone := tmp_path / "alone")
    assert (alone / "traces.jsonl").read_bytes() == (tmp_path / "traces.jsonl").read_bytes()


def test_what_an_earlier_run_wrote_is_not_read(tmp_path: Path) -> None:
    shutil.copytree(DATA / "codex", tmp_path, dirs_exist_ok=True)
    first = ingest([tmp_path], out := tmp_path / "out")
    (out / "parts-killed").mkdir()
    shutil.copy(out / "traces.jsonl", out / "parts-killed" / "0.part")
    again = ingest([tmp_path], out)
    assert (again["records"], again["traces"]) == (first["records"], first["traces"])
    assert again["files_left_out"]["written by an earlier run"] == 1
    assert ingest([out / "traces.jsonl"], out)["traces"] == first["traces"]


def test_a_file_of_yours_with_the_name_of_the_output_is_read(tmp_path: Path) -> None:
    for source, name in (("rollout-0.169.0", "a.jsonl"), ("letta-tool-calls", "traces.jsonl")):
        shutil.copy(DATA / "codex" / f"{source}.jsonl", tmp_path / name)
    alone = [ingest([tmp_path / name], tmp_path / "alone")["traces"] for name in ("a.jsonl", "traces.jsonl")]
    shutil.rmtree(tmp_path / "alone")
    assert ingest([tmp_path], tmp_path)["traces"] == sum(alone)
    assert ingest([tmp_path], tmp_path)["files_left_out"]["written by an earlier run"] == 1


def test_sessions_of_files_of_one_name_are_told_apart_in_any_order(tmp_path: Path) -> None:
    for name in ("joe", "jane"):
        said = [{"role": role, "content": f"{name}: {name}@example.org"} for role in ("user", "assistant")]
        (folder := tmp_path / name).mkdir()
        (folder / "x.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    found = []
    for names in (("joe",), ("joe", "jane"), ("jane", "joe")):
        ingest([tmp_path / name for name in names], tmp_path / "out")
        found.append({trace.trace_id for trace in read_traces(tmp_path / "out")})
    secrets = json.loads((tmp_path / "out" / "redactions.local.json").read_text())
    assert found[1] == found[2] == secrets.keys() and len(secrets) == 2
    assert all(each.startswith(f"{alone}-") for alone in found[0] for each in secrets)


def test_a_checkpoint_of_a_session_is_the_beginning_of_it(tmp_path: Path) -> None:
    whole = (DATA / "claude-code" / "session-2.1.39-progress.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.jsonl").write_bytes(b"".join(whole[:59]))
    (tmp_path / "in" / "2.jsonl").write_bytes(b"".join(whole))
    result = ingest([tmp_path / "in"], tmp_path / "out")
    assert result["duplicates"]["the beginning of another"] >= 1
    assert result["traces"] == 2


@pytest.mark.parametrize(
    ("call", "ours"),
    [
        (("Bash", {"command": "cd /w && ls", "description": "x"}), ("bash", {"command": "ls"})),
        (
            ("Edit", {"file_path": "/w/a.py", "old_string": "a", "new_string": "b"}),
            ("str_replace", {"path": "a.py", "old_str": "a", "new_str": "b"}),
        ),
        (
            ("Read", {"file_path": "/w/a.py", "offset": 3, "limit": 2}),
            ("read_file", {"path": "a.py", "first_line": 3, "last_line": 4}),
        ),
        (
            ("Read", {"file_path": "a", "limit": 2}),
            ("read_file", {"path": "a", "first_line": 1, "last_line": 2}),
        ),
        (("exec_command", {"cmd": "ls"}), ("bash", {"command": "ls"})),
        (("shell", {"command": ["bash", "-lc", "ls -l"]}), ("bash", {"command": "ls -l"})),
        (
            ("str_replace_editor", {"command": "create", "path": "/w/a", "file_text": "t"}),
            ("write_file", {"path": "a", "content": "t"}),
        ),
        (("finish", {"message": "done"}), ("submit", {})),
    ],
)
def test_foreign_tools_are_ours(call: tuple[str, Any], ours: tuple[str, Any]) -> None:
    found = our_call(ToolCall(call[0], json.dumps(call[1]), "c"), "/w")
    assert found is not None
    assert (found.name, json.loads(found.arguments), found.call_id) == (*ours, "c")
    assert our_call(ToolCall("TodoWrite", "{}")) is None
    assert our_call(ToolCall(call[0], "not json")) is None


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"unknown": 1}\n')
    (tmp_path / "prompt.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "traces.jsonl").write_text("not json\n")
    (tmp_path / "whole").mkdir()
    row = trace_row(Trace("t", "codex"))
    (tmp_path / "whole" / "traces.jsonl").write_bytes(json_bytes(row) + b"\n")
    (tmp_path / "whole" / "ingest.json").write_text("{")
    no_database = "no database, though long enough to be looked at as one" * 99
    (tmp_path / "whole" / "answers.sqlite").write_text(no_database)
    no, out = str(tmp_path / "no"), ["--out", str(tmp_path / "out"), "--quiet"]
    whole, below = str(tmp_path / "whole"), ["--quiet", "--out", str(tmp_path / "a.jsonl" / "below")]
    asked = ["--quiet", "--every-step", "--teacher", "a=http://127.0.0.1:9/v1#m"]
    for words, code, sentence in (
        (["show", whole, *out], 4, "CR0401: the file cannot be read"),
        (["replay", whole, *asked], 6, "CR0942: no step is worth asking about"),
        (["replay", f"{whole}/traces.jsonl", *asked], 4, "CR0942: this is a file;"),
        (["bind", f"{whole}/traces.jsonl", "--quiet"], 4, "CR0942: this is a file;"),
        *((["pairs", whole, *below], 2, "CR0209"), (["sft", whole, *below], 2, "CR0209")),
        (["show", whole, *below], 2, "CR0209"),
    ):
        assert main(["traces", *words]) == code, words
        assert sentence in capsys.readouterr().err
    with pytest.raises(InputError, match="the answers cannot be read"):
        AnswerStore(tmp_path / "whole" / "answers.sqlite", max_dollars=1.0, max_tokens=1)
    for words, code, sentence in (
        (["ingest", no], 4, "CR0942: there is no such file or folder."),
        (["ingest", str(tmp_path / "a.jsonl")], 6, "CR0942: no file of a known format"),
        (["ingest", str(tmp_path / "prompt.jsonl")], 6, "CR0942: no answer of a model is in these files."),
        (["ingest", str(DATA), "--format", "word"], 2, "CR0206: there is no format 'word'"),
        (["ingest", str(DATA), "--jobs", "0"], 2, "CR0206"),
        (["show", str(tmp_path / "bad")], 4, "CR0942: line 1 is not a trace."),
        (["pairs", no], 4, "CR0942: there are no traces to read"),
        (["pairs", no, "--split", "x"], 4, "CR0942"),
    ):
        assert main(["traces", *words, *out]) == code
        assert sentence in capsys.readouterr().err


def test_sessions_are_read_where_no_sandbox_can_be_imported(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['composer_replication.sandbox'] = None; "
    words = ["traces", "ingest", str(DATA / "codex"), "--out", str(tmp_path / "out"), "--quiet"]
    code = f"{blocked}from composer_replication.cli.main import main; sys.exit(main({words!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert (tmp_path / "out" / "traces.jsonl").stat().st_size
