"""The verb ``tasks``: arguments, JSON keys, exit codes."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from composer_replication.cli import tasks_verb
from composer_replication.cli.main import build_parser, main, rendered
from composer_replication.errors import NothingToDoError, UsageError
from composer_replication.tasks.build import BuildSummary
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import packed_path, read_content, sandbox_in_force, write_file

TINY = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
PINS = ["tinymath/numbers.py::clamp", "tinymath/text.py::initials"]


def parse(*words: str) -> argparse.Namespace:
    return build_parser("tasks").parse_args(["tasks", *words])


def call(*words: str) -> tuple[dict[str, Any], int, str]:
    args = parse(*words)
    result, code = resolve_name(args.run)(args)
    printed = json.loads(json.dumps(result, allow_nan=False))
    return printed, code, rendered(args.run, result)


def plain(text: str) -> list[str]:
    """Its lines, however wide their columns are."""
    return [" ".join(line.split()) for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("verb") / "tasks", PINS)


def test_what_comes_next_can_be_typed_where_a_folder_has_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a store"
    said = []
    for words in (
        ("export", str(folder), "--out", str(tmp_path / "tree")),
        ("export", str(folder), "ID", "--format", "swebench", "--out", str(tmp_path / "set")),
        ("show", str(folder), "--golden"),
    ):
        with pytest.raises(UsageError, match="CR0206") as caught:
            call(*words)
        said.append(caught.value.fix)
    with pytest.raises(NothingToDoError) as empty:
        TaskStore.create(folder).require_task_ids()
    summary = BuildSummary(folder, 1, 1, 1, {}, seconds=0.0, bytes=0, fingerprint="")
    tasks_verb.finish_build(summary, {}, quiet=False)
    said += [empty.value.fix, capsys.readouterr().err.splitlines()[-1]]
    for line in said:
        assert str(folder) in shlex.split(line)


def test_build(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on with what is there, and records what that lacks."""
    out = Path(shutil.copytree(folder, tmp_path / "tasks"))
    capsys.readouterr()  # of the build of the folder, where this test is the first
    result, code, text = call("build", str(TINY), "--out", str(out), "--symbol", PINS[0], "--json")
    assert set(result) == {
        *"tasks candidates valid rejected seconds bytes fingerprint flaky".split(),
        *"restricted_licences unusable unused_tests".split(),
    }
    counts = (result["tasks"], result["candidates"], result["valid"], result["rejected"])
    assert (code, *counts) == (0, 1, 1, 1, {})
    assert plain(text)[:2] == ["tasks 1", "candidates 1"]
    assert result["flaky"] == {"tinymath==1.0": []}
    assert not any(line.startswith("flaky") for line in plain(text))
    assert result["unused_tests"]["tinymath==1.0"]["never_green"] == 0
    assert "never_green 0" in text
    assert result["restricted_licences"] == {"tinymath==1.0": "no licence file"}
    assert "restricted licences tinymath==1.0 no licence file" in plain(text)
    summary = json.loads((out / "summary.json").read_text())
    assert {key: summary[key] for key in result} == result
    streams = capsys.readouterr()
    assert streams.out == ""
    assert f"Next: composer-rl recipe new --tasks {out} --model MODEL" in streams.err


def test_show_and_stats(folder: Path) -> None:
    shown, code, text = call("show", str(folder))
    keys = "tasks by_repo by_granularity by_removal fail_to_pass hidden recorded proved_by"
    assert set(shown) == set(keys.split())
    assert (code, len(shown["tasks"]), shown["by_repo"]) == (0, 2, {"tinymath==1.0": 2})
    row = shown["tasks"][0]
    assert row["task_id"] in text
    assert "return low" not in json.dumps(shown)
    (proved,) = shown["proved_by"]
    assert proved == sandbox_in_force(None)
    assert f"proven in {proved}" in text.splitlines()
    stats, code, text = call("stats", str(folder))
    assert (code, stats["tasks"], stats["by_granularity"], stats["hidden"]) == (0, 2, {"function": 2}, 2)
    assert stats["fail_to_pass"] == shown["fail_to_pass"] == 5
    assert plain(text)[0] == "tasks 2"
    assert f"proved by {proved}" in plain(text)
    assert stats["flaky"] == {"tinymath==1.0": []}
    assert not any(line.startswith("flaky") for line in plain(text))
    one, _, text = call("show", str(folder), row["task_id"])
    assert set(one) == set(shown)
    assert {key: one["tasks"][0][key] for key in row} == row
    assert set(one["tasks"][0]) - set(row) == {
        "instruction", "written_instruction", "strength", "difficulty",
    }  # fmt: skip
    assert "return low" not in json.dumps(one)


def apply(tree: Path, patch: str) -> int:
    words = ["git", "apply", "--whitespace=nowarn", "-"]
    return subprocess.run(words, cwd=tree, input=patch.encode(), capture_output=True, check=False).returncode


def test_the_golden_patch_is_shown_when_asked_for(folder: Path, tmp_path: Path) -> None:
    (task,) = [task for task in TaskStore.open(folder).tasks() if task.symbol == "clamp"]
    result, _, text = call("show", str(folder), task.task_id, "--golden")
    without, _, plain = call("show", str(folder), task.task_id)
    patch = result["tasks"][0].pop("golden_patch")
    assert result == without
    assert "golden patch" not in plain
    assert text.endswith(f"\ngolden patch\n{patch}".rstrip("\n"))
    assert "+        return low\n" in patch
    assert not any(test.rpartition("::")[2] in patch for test in task.tests.hidden)
    tree = tmp_path / "tree"
    call("export", str(folder), task.task_id, "--out", str(tree))
    assert (tree / "tinymath" / "numbers.py").read_bytes() != (TINY / "tinymath" / "numbers.py").read_bytes()
    assert apply(tree, patch) == 0
    for path in (TINY / "tinymath").glob("*.py"):
        assert (tree / "tinymath" / path.name).read_bytes() == path.read_bytes()
    assert apply(tree, patch) != 0  # it fits the broken tree alone


def test_export(folder: Path, tmp_path: Path) -> None:
    task_id = call("show", str(folder))[0]["tasks"][0]["task_id"]
    result, code, text = call("export", str(folder), task_id, "--out", str(tmp_path / "tree"))
    tree = tmp_path / "tree"
    written = [
        path for path in tree.rglob("*") if path.is_file() and ".git" not in path.relative_to(tree).parts
    ]
    assert (code, result["task_id"], result["files"]) == (0, task_id, len(written))
    assert result["bytes"] == sum(path.stat().st_size for path in written)
    assert task_id in text
    assert "NotImplementedError" in (tree / "tinymath" / "numbers.py").read_text()
    assert (tree / ".git" / "HEAD").read_text() == "ref: refs/heads/main\n"
    call("export", str(folder), task_id, "--out", str(tmp_path / "golden"), "--golden")
    assert not (tmp_path / "golden" / ".git").exists()
    for path in ("tinymath/numbers.py", "tests/test_numbers.py"):
        assert (tmp_path / "golden" / path).read_bytes() == (TINY / path).read_bytes()
    with pytest.raises(UsageError, match="CR0231"):
        call("export", str(folder), task_id, "--out", str(tmp_path / "tree"))


def test_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, code, text = call("split", str(folder), "--heldout-fraction", "0.5", "--seed", "3")
    assert "2/2" in capsys.readouterr().err
    assert set(result) == {"train", "heldout", "fingerprint"}
    assert (code, len(result["train"]), len(result["heldout"])) == (0, 1, 1)
    state = json.loads((folder / "split.json").read_text())
    assert state["fingerprint"] == result["fingerprint"]
    assert "content" in state["checked"]
    assert f"heldout {result['heldout'][0]}" in plain(text)
    assert call("split", str(folder), "--heldout-fraction", "0.5", "--seed", "3")[0] == result


def test_validate(folder: Path) -> None:
    result, code, text = call("validate", str(folder), "--repeat", "1", "--quiet")
    here = sandbox_in_force(None)
    counts = {"tasks": 2, "passed": 2, "failed": []}
    assert (result, code) == ({**counts, "proved_by": [here], "validated_in": here}, 0)
    assert plain(text)[:2] == ["tasks 2", "passed 2"]
    assert f"validated in {here}" in plain(text)


def test_validate_of_a_broken_store_is_4(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    task_id = call("show", str(folder))[0]["tasks"][0]["task_id"]
    secret = tmp_path / "copy" / "secrets" / f"{task_id}.json"
    write_file(secret, read_content(packed_path(secret)).replace(b"test_", b"tset_"))
    result, code, text = call("validate", str(tmp_path / "copy"), "--repeat", "1", "--quiet")
    assert (code, result["passed"]) == (4, 1)
    assert [row["gate"] for row in result["failed"]] == ["damaged"]
    assert set(result["failed"][0]) == {"task_id", "gate", "detail"}
    assert f"  task_id {task_id}, gate damaged, " in text


@pytest.mark.long
def test_all_sizes_and_ways_are_built(tmp_path: Path) -> None:
    flags = ("--granularity", "all", "--removal", "all", "--visible-only", "--quiet")
    result, code, _ = call("build", str(TINY), "--out", str(tmp_path / "x"), *flags, "--max-tasks", "7")
    assert code == 0
    assert result["valid"] == result["tasks"] == 7
    stats, _, _ = call("stats", str(tmp_path / "x"))
    assert {"function", "class"} <= set(stats["by_granularity"])
    summary, code, _ = call("validate", str(tmp_path / "x"), "--repeat", "1", "--quiet")
    assert (code, summary["failed"]) == (0, [])


def test_pins_need_one_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="CR0206"):
        call("build", str(TINY), "other", "--out", str(tmp_path / "x"), "--symbol", PINS[0])


def test_repeat_below_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "validate", str(folder), "--repeat", "0"]) == 2
    assert capsys.readouterr().err.startswith("CR0206: argument --repeat: '0' is not a whole number")


@pytest.mark.long
def test_nothing_valid_is_6_with_reasons_and_a_summary(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1"\n')
    (project / "p.py").write_text("def f():\n    return 0\n")
    (project / "test_p.py").write_text(
        "import p\n\n\ndef test_f():\n    assert not p.f()\n\n\ndef test_g():\n    pass\n"
    )
    with pytest.raises(NothingToDoError, match=r"CR0418.*stub-passes 1") as caught:
        call("build", str(project), "--out", str(tmp_path / "out"), "--quiet")
    assert caught.value.exit_code == 6
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["rejected"] == {"stub-passes": 1}


@pytest.mark.parametrize(
    ("leaks", "failed", "code"),
    [((), (), 0), ((("t1", "pyc", "a.pyc"),), (), 4), ((), ("git cat-file: no answer",), 4)],
)
def test_leakscan(
    leaks: tuple[tuple[str, str, str], ...],
    failed: tuple[str, ...],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Keys and exit codes; the walk itself is tested where it lives."""
    from composer_replication.tasks.leaks import leak_scan
    from composer_replication.tasks.leaks.leak_search import Leak

    found_leaks = tuple(Leak(*leak) for leak in leaks)
    summary = leak_scan.ScanSummary(2, found_leaks, ("t2",), 7, ("b.gz (broken)",), failed)
    monkeypatch.setattr(tasks_verb, "scan_store", lambda *_, **__: summary)
    result, found, text = call("leakscan", str(tmp_path), "--quiet")
    assert found == code
    assert result == {
        "tasks": 2,
        "leaks": [{"task_id": name, "channel": channel, "path": path} for name, channel, path in leaks],
        "without_distinctive_lines": ["t2"],
        "files_searched": 7,
        "not_searched": ["b.gz (broken)"],
        "failed_checks": list(failed),
    }
    assert "files searched            7" in text
    assert ("leaks\n  task_id t1, channel pyc, path a.pyc" in text) == bool(leaks)
    assert ("failed checks             git cat-file: no answer" in text) == bool(failed)


@pytest.mark.parametrize(
    "words", [("validate",), ("leakscan",), ("export", "--format", "swebench", "--out", "OUT/set.jsonl")]
)
def test_an_empty_store_is_not_called_whole(tmp_path: Path, words: tuple[str, ...]) -> None:
    TaskStore.create(tmp_path / "store")
    verb, *more = [word.replace("OUT", str(tmp_path)) for word in words]
    with pytest.raises(NothingToDoError, match="CR0604"):
        call(verb, str(tmp_path / "store"), *more)
    assert not (tmp_path / "set.jsonl").exists()
