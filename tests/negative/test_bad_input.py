"""Bad input through the command line: one sentence with code, place and next step, the right exit code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_trees import flip_a_byte

from composer_replication.run_folder import RunFolder
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import find_blob

Command = Callable[..., Any]
TINY = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"


# --- recipes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("modle.name=x", "CR0204", "the nearest known key is model"),
        ("sandbox.backend=bubblewarp", "CR0305", "no sandbox backend called 'bubblewarp'"),
        ("reward.function=absent_module:x", "CR0210", "No module named 'absent_module'"),
    ],
)
def test_a_recipe_that_is_wrong_begins_no_run(
    command: Command, recipe: Path, tmp_path: Path, setting: str, code: str, words: str
) -> None:
    answer = command("train", recipe, "--out", tmp_path / "run", "--set", setting)
    assert (answer.exit_code, answer.error["code"]) == (2, code)
    assert words in answer.error["message"]
    if code == "CR0204":
        assert answer.error["where"] == f"--set {setting.partition('=')[0]}"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", [0, -3])
def test_a_quick_start_of_no_steps(command: Command, tmp_path: Path, steps: int) -> None:
    answer = command("quickstart", "--steps", steps, "--out", tmp_path / "run")
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0206")
    assert not (tmp_path / "run").exists()


# --- folders ---------------------------------------------------------------------------------


def test_a_folder_that_is_taken(command: Command, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    for words in (("train", recipe), ("train", recipe, "--resume"), ("quickstart",)):
        answer = command(*words, "--out", run)
        assert (answer.exit_code, answer.error["code"]) == (2, "CR0231")
        assert "no run is in it" in answer.error["message"]
        assert "--resume" not in answer.error["fix"]
    answer = command("tasks", "build", TINY, "--out", run)
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0231")
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    assert (run / "notes.txt").read_text() == "mine"


def test_an_output_folder_that_cannot_be(command: Command, recipe: Path, store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    task_id = TaskStore.open(store).task_ids()[0]
    for words in (("train", recipe), ("tasks", "build", TINY), ("tasks", "export", store, task_id)):
        answer = command(*words, "--out", tmp_path / "file" / "below")
        assert (answer.exit_code, answer.error["code"]) == (2, "CR0209")
        assert f"{tmp_path / 'file'} is not a folder" in answer.error["message"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_second_build_in_one_folder(command: Command, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "out").locked():
        answer = command("tasks", "build", TINY, "--out", tmp_path / "out")
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0203")


# --- stores and run folders that were damaged ----------------------------------------------------


def test_a_damaged_store(command: Command, store: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "store"
    shutil.copytree(store, damaged)
    opened = TaskStore.open(damaged)
    task = opened.tasks()[0]
    digest = opened.repository(opened.record(task.task_id).repository_record).files[task.path]
    blob = find_blob(damaged / "objects", digest)
    assert blob is not None
    flip_a_byte(blob)
    task_id = opened.task_ids()[0]
    for words in (
        ("tasks", "show", damaged, task_id),
        ("tasks", "export", damaged, task_id, "--out", tmp_path / "tree"),
    ):
        answer = command(*words)
        assert (answer.exit_code, answer.error["code"]) == (4, "CR0411")
        assert digest in answer.error["where"]
    answer = command("tasks", "build", TINY, "--out", damaged)  # must not call it built
    assert (answer.exit_code, answer.error["code"]) == (4, "CR0411")
    assert "new folder" in answer.error["fix"]
    (damaged / "manifest.json").unlink()
    for words in (("tasks", "stats", damaged), ("eval", "tiny-random", "--tasks", damaged)):
        answer = command(*words)
        assert (answer.exit_code, answer.error["code"]) == (4, "CR0411")
        assert answer.error["where"] == str(damaged)
