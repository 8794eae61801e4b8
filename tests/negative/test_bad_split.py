"""Train and held-out tasks that are not apart begin no run, and no run goes on with other ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.records import Edit
from composer_replication.run_folder import write_json
from composer_replication.safety import HeldoutSplit
from composer_replication.tasks.store import TaskStore

Command = Callable[..., Any]


@pytest.fixture
def own_store(store: Path, recipe: Path) -> TaskStore:
    """A copy of the store that a test may change; the recipe trains on it and holds some of it out."""
    folder = recipe.parent / "tasks"
    shutil.copytree(store, folder)
    recipe.write_text(recipe.read_text().replace(str(store), str(folder)) + "[heldout]\n")
    return TaskStore.open(folder)


def keep(store: TaskStore, path: Path, heldout: int) -> HeldoutSplit:
    """Write the split that holds out the task of that number."""
    tasks = store.tasks()
    held = tasks.pop(heldout)
    split = HeldoutSplit(map(store.content, tasks), map(store.content, [held]))
    write_json(path, split.state_dict())
    return split


def train(command: Command, recipe: Path, *flags: str, fails: bool = True) -> Any:
    return command("train", recipe, "--out", recipe.parent / "run", *flags, fails=fails)


def test_a_split_that_is_not_there(command: Command, recipe: Path, own_store: TaskStore) -> None:
    answer = train(command, recipe, "--set", "heldout.split=mine.json")
    assert (answer.exit_code, answer.error["code"]) == (4, "CR0504")
    assert answer.error["where"] == str(recipe.parent / "mine.json")
    assert not (recipe.parent / "run").exists()


def test_train_and_held_out_tasks_that_are_near_copies(
    command: Command, recipe: Path, own_store: TaskStore
) -> None:
    body = "\n    low = min(values, key=rank)\n    high = max(values, key=rank)\n    return scale(low, high, count=2)"
    text = ""
    for name, own in zip(own_store.task_ids(), (body, body.replace("low", "least")), strict=True):
        text += f"def {'first' if not text else 'second'}(values, rank):"
        record = own_store.record(name)
        marker = "\n    raise NotImplementedError"
        edits = (Edit("tinymath/copies.py", len(text), len(text + own), marker),)
        own_store.put_task(replace(record, path="tinymath/copies.py", edits=edits), own_store.secret(name))
        text += f"{own}\n\n\n"
    slug = own_store.record(own_store.task_ids()[0]).repository_record
    repository = own_store.repository(slug)
    files = {**repository.files, "tinymath/copies.py": own_store.put_blob(text.encode())}
    own_store.put_repository(slug, replace(repository, files=files))
    answer = train(command, recipe, "--set", "heldout.fraction=0.5")
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0503")
    assert "all belong together" in answer.error["message"]
    assert "rank" not in answer.err + answer.out


@pytest.mark.long
def test_a_run_does_not_go_on_with_another_split(
    command: Command, recipe: Path, own_store: TaskStore
) -> None:
    path = own_store.root / "split.json"
    first = keep(own_store, path, 0)
    answer = train(command, recipe, fails=False)
    assert answer.exit_code == 0, answer.err
    run = recipe.parent / "run"
    assert json.loads((run / "split.json").read_text())["fingerprint"] == first.fingerprint
    (run / "summary.json").unlink()
    second = keep(own_store, path, 1)
    answer = train(command, recipe, "--resume")
    assert (answer.exit_code, answer.error["code"]) == (4, "CR0884")
    assert first.fingerprint in answer.error["message"]
    assert second.fingerprint in answer.error["message"]
    keep(own_store, path, 0)
    answer = train(command, recipe, "--resume", fails=False)
    assert answer.exit_code == 0, answer.err
