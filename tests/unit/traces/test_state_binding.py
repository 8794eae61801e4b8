"""Sessions bound to a tree, and their calls made again there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.cli.main import main
from composer_replication.records import ToolCall, ToolResult
from composer_replication.traces.pairs import our_call
from composer_replication.traces.replay import commit_of, redone, task_names
from composer_replication.traces.trace_records import StepResult, Trace, TraceStep

CODEX = Path(__file__).parents[2] / "data" / "traces" / "codex" / "rollout-0.169.0.jsonl"
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": "import unittest, calc\nclass T(unittest.TestCase):\n"
    "    def test_add(self): self.assertEqual(calc.add(2,3),5)\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The repository in which the recorded session of Codex worked, with a later commit that it never saw."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for files in (FILES, {"calc.py": "def add(a, b):\n    return a + b\n"}):
        for name, text in files.items():
            (folder / name).write_text(text)
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", "x")
    return folder


def git(folder: Path, *words: str) -> str:
    names = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")
    who = os.environ | {f"GIT_{name}": "a@b.invalid" for name in names}
    done = subprocess.run(["git", *words], cwd=folder, env=who, check=True, capture_output=True)
    return done.stdout.decode().strip()


def bind(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["traces", "bind", *words, "--json", "--quiet"])
    return dict(json.loads(capsys.readouterr().out))


def test_what_a_session_did_comes_out_again_at_its_commit_and_not_at_another(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sessions"
    assert main(["traces", "ingest", str(CODEX), "--out", str(out), "--quiet"]) == 0
    capsys.readouterr()
    begun, later = git(repository, "rev-parse", "HEAD~1"), git(repository, "rev-parse", "HEAD")
    found = bind(capsys, str(out), "--repository", str(repository), "--commit", begun)
    assert (found["sessions"], found["steps"], found["reproduced_steps"]) == (1, 4, 4)
    assert found["calls"] == {"the same": 5}
    (row,) = [json.loads(line) for line in (out / "bindings.jsonl").read_text().splitlines()]
    assert len(row["executable"]) == found["executable_steps"]
    found = bind(capsys, str(out), "--repository", str(repository), "--commit", later)
    assert found["reproduced_steps"] < 4
    # the session's own commit is not in this clone, and its folder is nobody's word
    found = bind(capsys, str(out), "--repository", str(repository))
    assert found["error"]["code"] == "CR0942"
    assert "CR0407" in found["error"]["message"]
    assert "is known" in bind(capsys, str(out))["error"]["message"]
    assert bind(capsys, str(out), "--commit", "HEAD")["error"]["code"] == "CR0206"


@pytest.mark.parametrize(
    ("repository", "expected"),
    [
        ("https://github.com/a/b.git", f"git+https://github.com/a/b.git@{'1' * 40}"),
        ("git@github.com:a/b.git", f"git@github.com:a/b.git@{'1' * 40}"),
        ("a/b", f"git+https://github.com/a/b@{'1' * 40}"),
        ("/etc", ""),
        ("file:///etc", ""),
        ("testbed", ""),
    ],
)
def test_a_recorded_commit_names_where_it_is_fetched(repository: str, expected: str) -> None:
    trace = Trace("a", "codex", repository=repository, commit="1" * 40)
    assert commit_of(trace, "", "") == expected


def test_tasks_are_known_by_their_names_in_swe_bench_too() -> None:
    records = {"t1": SimpleNamespace(instance_id="django__django-1"), "t2": SimpleNamespace(instance_id="")}
    store = SimpleNamespace(task_ids=lambda: list(records), record=records.__getitem__)
    names = task_names(SimpleNamespace(store=store))  # type: ignore[arg-type]
    assert names == {"django__django-1": "t1", "t1": "t1", "t2": "t2"}


def test_what_never_ran_is_not_run_and_lists_of_others_are_not_compared() -> None:
    trace, made = Trace("t", "claude-code"), list[str]()
    listing, rest = ToolCall("Glob", '{"pattern": "x"}', "1"), ToolCall("Bash", '{"command": "ls"}', "3")
    refused, denied = ToolCall("Bash", '{"command": "rm x"}', "2"), StepResult("2", "no", is_error=True)
    trace.add(TraceStep("agent", calls=[listing], results=[StepResult("1", "a")]))
    trace.add(TraceStep("agent", "", -1, "", [refused, rest], [denied, StepResult("3", "b")], "", {"denied"}))
    found = redone(trace, range(2), lambda call: made.append(call.arguments) or ToolResult("b"))
    assert list(found) == ["not compared", "the same"]
    assert len(made) == 2 and "rm" not in "".join(made)


def test_a_patch_of_codex_that_changes_one_place_is_an_edit_of_ours() -> None:
    change = "*** Begin Patch\n*** Update File: /r/a.py\n@@ def f\n x\n-old\n+new\n*** End Patch"
    added = "*** Begin Patch\n*** Add File: b.py\n+one\n+two\n*** End Patch"
    twice = change.replace("*** End", "@@\n-y\n+z\n*** End")
    calls = [ToolCall("apply_patch", json.dumps({"input": text}), "1") for text in (change, added)]
    found = [our_call(call, "/r") for call in calls]
    assert [(each.name, json.loads(each.arguments)) for each in found if each] == [
        ("str_replace", {"path": "a.py", "old_str": "x\nold", "new_str": "x\nnew"}),
        ("write_file", {"path": "b.py", "content": "one\ntwo\n"}),
    ]
    assert our_call(ToolCall("apply_patch", json.dumps({"input": twice}), "1")) is None
