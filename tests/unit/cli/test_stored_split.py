"""A split on disk: used where the recipe means it, refused where it speaks of other tasks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.assembly import training_rows
from composer_replication.cli.task_division import divide_tasks, open_split, split_file
from composer_replication.config import RunConfig, parse_config
from composer_replication.errors import InputError, NothingToDoError, SplitOverlapError, UsageError
from composer_replication.records import Edit
from composer_replication.run_folder import write_json
from composer_replication.safety import HeldoutSplit
from composer_replication.tasks.store import TaskStore

PINS = ["numbers.py::clamp", "text.py::initials", "numbers.py::mean", "numbers.py::sign"]


@pytest.fixture(scope="module")
def built(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("stored") / "tasks", [f"tinymath/{pin}" for pin in PINS])


@pytest.fixture
def store(built: Path, tmp_path: Path) -> TaskStore:
    shutil.copytree(built, tmp_path / "tasks")
    return TaskStore.open(tmp_path / "tasks")


def recipe(store: TaskStore, **heldout: Any) -> RunConfig:
    table = {"model": {"name": "tiny-random"}, "tasks": {"store": str(store.root)}, "heldout": heldout}
    return parse_config(table, where="run.toml")


def drawn(store: TaskStore, seed: int = 3, fraction: float = 0.5) -> HeldoutSplit:
    return HeldoutSplit.split(map(store.content, store.tasks()), fraction, seed)


def keep(
    store: TaskStore, name: str = "split.json", change: Callable[[dict[str, Any]], Any] | None = None
) -> Path:
    state = drawn(store).state_dict()
    path = store.root / name
    write_json(path, change(state) if change else state)
    return path


def test_the_split_of_the_store_is_used_where_the_recipe_says_nothing_else(
    store: TaskStore, tmp_path: Path
) -> None:
    assert split_file(recipe(store), store, tmp_path) is None
    path = keep(store)
    wanted = json.loads(path.read_text())
    assert split_file(recipe(store), store, tmp_path) == path
    tasks = divide_tasks(recipe(store), store, tmp_path)
    assert tasks.split is not None
    assert tasks.split.fingerprint == wanted["fingerprint"]
    assert [task.task_id for task in tasks.heldout] == [row["task_id"] for row in wanted["heldout"]]
    assert [task.task_id for task in tasks.train] == [row["task_id"] for row in wanted["train"]]
    assert tasks.split.checked == ("id", "content", "near-duplicate", "origin")


def test_repositories_or_a_fraction_go_before_the_split_of_the_store(
    store: TaskStore, tmp_path: Path
) -> None:
    keep(store)
    for heldout in ({"fraction": 0.25}, {"repositories": ["tinymath"]}):
        assert split_file(recipe(store, **heldout), store, tmp_path) is None
    tasks = divide_tasks(recipe(store, fraction=0.25), store, tmp_path)
    assert len(tasks.heldout) == 1
    assert tasks.split is not None
    assert {"id", "content", "origin"} <= set(tasks.split.checked)
    assert all(task.has_hidden_tests for task in tasks.heldout)
    assert not {task.task_id for task in tasks.train} & {task.task_id for task in tasks.heldout}
    without = parse_config({"model": {"name": "x"}, "tasks": {"store": str(store.root)}}, where="run.toml")
    assert split_file(without, store, tmp_path) is None
    assert divide_tasks(without, store, tmp_path).split is None
    built = parse_config(
        {"model": {"name": "x"}, "tasks": {"source": ["a"]}, "heldout": {}}, where="run.toml"
    )
    assert split_file(built, store, tmp_path) is None


def test_a_named_split_lies_beside_the_recipe(store: TaskStore, tmp_path: Path) -> None:
    keep(store)
    other = drawn(store, seed=4, fraction=0.25)
    write_json(tmp_path / "splits" / "mine.json", other.state_dict())
    tasks = divide_tasks(recipe(store, split="splits/mine.json"), store, tmp_path)
    assert tasks.split is not None
    assert tasks.split.fingerprint == other.fingerprint != drawn(store).fingerprint


def set_row(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {**state, "train": [{**state["train"][0], **values}, *state["train"][1:]]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: {**state, "fingerprint": "0" * 64}, "do not give its fingerprint"),
        (set_row(golden="return"), "cannot be read"),
    ],
)
def test_a_split_that_was_changed_by_hand_is_refused(
    store: TaskStore, tmp_path: Path, change: Any, words: str
) -> None:
    keep(store, change=change)
    with pytest.raises(InputError, match=words) as caught:
        divide_tasks(recipe(store), store, tmp_path)
    assert caught.value.code == "CR0504"
    assert str(store.root / "split.json") in str(caught.value)
    assert "composer-rl tasks split" in caught.value.fix


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such split"), *((text, "cannot be read") for text in (b"{", b"\xff", b"[" * 10**5))],
)
def test_a_file_that_is_no_split_is_refused(
    store: TaskStore, tmp_path: Path, content: Any, words: str
) -> None:
    if content is not None:
        (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        divide_tasks(recipe(store, split="mine.json"), store, tmp_path)
    assert caught.value.code == "CR0504"


def refused(path: Path, store: TaskStore) -> InputError:
    with pytest.raises(InputError) as caught:
        open_split(path, store)
    assert str(path) in str(caught.value)
    assert "composer-rl tasks split" in caught.value.fix
    return caught.value


def take_out(store: TaskStore, name: str) -> None:
    store.drop_task(name)


def split_without(store: TaskStore, name: str) -> None:
    others = [task for task in store.tasks() if task.task_id != name]
    split = HeldoutSplit.split(map(store.content, others), 0.4, 0)
    write_json(store.root / "split.json", split.state_dict())


def change_task(store: TaskStore, name: str) -> None:
    record, secret = store.record(name), store.secret(name)
    (edit,) = record.edits
    store.put_task(replace(record, edits=(replace(edit, text=f"{edit.text} from None"),)), secret)


@pytest.mark.parametrize(("act", "number"), [(take_out, 1), (split_without, 2), (change_task, 0)])
def test_a_task_that_is_gone_added_or_changed_is_named(store: TaskStore, act: Any, number: int) -> None:
    path, name = keep(store), store.task_ids()[number]
    act(store, name)
    error = refused(path, TaskStore.open(store.root))
    said = f"1 task(s) were added, taken out or changed since the split was made, {name} first."
    assert (error.code, error.message) == ("CR0504", said)


def test_a_file_of_the_repository_that_changed_changes_its_tasks(store: TaskStore) -> None:
    path = keep(store)
    slug = store.record(store.task_ids()[0]).repository_record
    repository = store.repository(slug)
    files = {**repository.files, "tinymath/__init__.py": store.put_blob(b"VALUE = 1\n")}
    store.put_repository(slug, replace(repository, files=files))
    error = refused(path, TaskStore.open(store.root))
    assert error.code == "CR0504"
    assert error.message.startswith("4 task(s) were added, taken out or changed")


def test_a_split_of_bare_ids_is_refused(store: TaskStore, tmp_path: Path) -> None:
    path = store.root / "split.json"
    write_json(path, HeldoutSplit.split(store.task_ids(), 0.5, 0).state_dict())
    error = refused(path, store)
    assert (error.code, error.exit_code) == ("CR0504", 4)
    unchecked = HeldoutSplit.split(map(store.content, store.tasks()), 0.5, 0, check_content=False)
    write_json(path, unchecked.state_dict())
    assert refused(path, store).code == "CR0504"


def test_sides_that_were_parted_by_hand_are_compared_in_full(store: TaskStore, tmp_path: Path) -> None:
    """Two near-copies, parted by a file that is consistent in itself: its hashes cannot tell."""
    one, other = (store.record(name) for name in store.task_ids()[:2])
    golden = "def span(values):\n    low = min(values, key=rank)\n    high = max(values, key=rank)\n    return scale(low, high, count=2)\n"
    copy = golden.replace("low", "first").replace("2", "7")
    repository = store.repository(one.repository_record)
    files = {**repository.files, "tinymath/copies.py": store.put_blob((golden + copy).encode())}
    store.put_repository(one.repository_record, replace(repository, files=files))
    spans = {one: (0, len(golden)), other: (len(golden), len(golden + copy))}
    for record, (start, end) in spans.items():
        edits = (Edit("tinymath/copies.py", start, end, ""),)
        store.put_task(replace(record, edits=edits), store.secret(record.task_id))
    rows = {
        row["task_id"]: row
        for side in ("train", "heldout")
        for row in drawn(store, fraction=0.25).state_dict()[side]
    }
    train, heldout = [one.task_id, *store.task_ids()[2:]], [other.task_id]
    by_id = HeldoutSplit.from_state_dict(_parted(rows, train, heldout))
    write_json(tmp_path / "mine.json", by_id.state_dict())
    with pytest.raises(SplitOverlapError) as caught:
        divide_tasks(recipe(store, split="mine.json"), store, tmp_path)
    assert caught.value.pairs == [("near-duplicate", one.task_id, other.task_id)]


def _parted(rows: dict[str, Any], train: list[str], heldout: list[str]) -> dict[str, Any]:
    """A consistent state with these sides, as somebody who knows the format would write it."""
    import hashlib

    sides = {"train": sorted(train), "heldout": heldout}
    hashed = {name: [[key, rows[key]["content_sha256"]] for key in keys] for name, keys in sides.items()}
    return {
        "version": 2,
        "kind": "HeldoutSplit",
        "fingerprint": hashlib.sha256(
            json.dumps({"version": 1, **hashed}, sort_keys=True).encode()
        ).hexdigest(),
        "checked": ["id", "content", "near-duplicate", "origin"],
        "num_without_hidden_tests": 0,
        **{name: [rows[key] for key in keys] for name, keys in sides.items()},
    }


def test_tasks_that_show_their_golden_are_left_out_of_a_stored_split(
    store: TaskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store)
    whole = divide_tasks(recipe(store), store, tmp_path)
    shown = whole.train[0]
    line = next(line for line in store.broken_text(shown).splitlines() if line.startswith("def "))
    golden = store.golden_body
    config = recipe(store).model_copy(
        update={"rollouts": recipe(store).rollouts.model_copy(update={"context_lines": 99})}
    )
    monkeypatch.setattr(store, "golden_body", lambda task: line if task == shown else golden(task))
    with pytest.raises(InputError, match="changed since the split was made"):
        divide_tasks(config, store, tmp_path)  # the content has the golden too, so this is another task now
    keep(store)
    said: list[str] = []
    tasks = divide_tasks(config, store, tmp_path, said.append)
    assert said == ["tasks: 1 left out: their prompts would show the deleted code"]
    assert shown not in (*tasks.train, *tasks.heldout)
    assert tasks.split is not None
    assert tasks.split.train_ids == tuple(task.task_id for task in tasks.train)
    with pytest.raises(InputError, match="CR0429"):
        training_rows(config, store, whole.train)


def test_tasks_without_content_to_compare_are_refused(
    store: TaskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = store.content
    monkeypatch.setattr(store, "content", lambda task: replace(content(task), golden=""))
    with pytest.raises(UsageError, match=r"CR0504.*could not be compared by near-duplicate"):
        divide_tasks(recipe(store, fraction=0.5), store, tmp_path)


def test_a_split_that_leaves_nothing_to_train_on_is_said(store: TaskStore, tmp_path: Path) -> None:
    everything = HeldoutSplit([], map(store.content, store.tasks()))
    write_json(tmp_path / "mine.json", everything.state_dict())
    with pytest.raises(NothingToDoError, match="none is left to train on"):
        divide_tasks(recipe(store, split="mine.json"), store, tmp_path)
