"""An interrupted validation goes on with what has not passed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.records import Task
from composer_replication.tasks import validate
from composer_replication.tasks.intake import cache as cache_module
from composer_replication.tasks.intake.cache import cache_folder
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import find_blob
from composer_replication.tasks.validate import (
    ValidationFailure,
    journal_key,
    journal_path,
    passed_tasks,
    validate_store,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def own_journals(tiny_store: TaskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with journals of its own; wheels and environments are those of all tests."""
    tiny_store.environment(tiny_store.tasks()[0])  # the shared cache has it now
    shared, cache = cache_folder(), tmp_path / "cache"
    cache.mkdir()
    for name in ("wheels", "environments"):
        (shared / name).mkdir(exist_ok=True)
        (cache / name).symlink_to(shared / name)
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(cache))
    return cache


@pytest.fixture
def store(tiny_store: TaskStore, tmp_path: Path) -> TaskStore:
    """A copy of the small store, of four tasks."""
    shutil.copytree(tiny_store.root, tmp_path / "store")
    return TaskStore.open(tmp_path / "store")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of tasks whose gates are run; here they pass at once."""
    ids: list[str] = []

    def passes(_store: TaskStore, task_id: str, _repeat: int = 1) -> None:
        ids.append(task_id)

    monkeypatch.setattr(validate, "validate_task", passes)
    return ids


def key_of(store: TaskStore, **changes: Any) -> dict[str, Any]:
    return {**journal_key(store, repeat=1), **changes}


def note(store: TaskStore, *task_ids: str, **changes: Any) -> Path:
    """A journal in which these tasks have passed."""
    key = key_of(store, **changes)
    with passed_tasks(key, store.task_ids(), resume=True) as journal:
        for task_id in task_ids:
            journal.add(task_id)
    return journal_path(key)


def test_without_resume_everything_is_tried_again(store: TaskStore, tried: list[str]) -> None:
    path = note(store, *store.task_ids())
    assert validate_store(store.root, repeat=1).taken_over == 0
    assert sorted(tried) == store.task_ids()
    assert path.read_text().count("\n") == 4  # anew, not in addition
    assert validate_store(store.root, repeat=1, resume=True).taken_over == 4
    assert len(tried) == 4


def test_a_task_that_fails_is_tried_again(
    store: TaskStore, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, *_ = store.task_ids()
    passes = validate.validate_task
    fails = [ValidationFailure(bad, "golden-fails", "today")]

    def one_fails(opened: TaskStore, task_id: str, *words: Any, **more: Any) -> Any:
        passes(opened, task_id, *words, **more)
        return fails[0] if fails and task_id == bad else None

    monkeypatch.setattr(validate, "validate_task", one_fails)
    assert validate_store(store.root, repeat=1).passed == 3
    tried.clear()
    assert validate_store(store.root, repeat=1, resume=True).failed == tuple(fails)
    assert tried == [bad]
    fails.clear()
    summary = validate_store(store.root, repeat=1, resume=True)
    assert (summary.passed, summary.taken_over, summary.failed) == (4, 3, ())


@pytest.mark.parametrize(
    "changes", [{"fingerprint": "0" * 64}, {"gates_version": 0}, {"repeat": 3}, {"python": "another"}]
)
def test_what_passed_under_other_conditions_counts_for_nothing(
    store: TaskStore, tried: list[str], changes: dict[str, Any]
) -> None:
    note(store, *store.task_ids(), **changes)
    assert validate_store(store.root, repeat=1, resume=True).taken_over == 0
    assert sorted(tried) == store.task_ids()


def test_a_changed_task_is_tried_again(store: TaskStore, tried: list[str]) -> None:
    note(store, *store.task_ids())
    task_id = store.task_ids()[0]
    store.put_task(replace(store.record(task_id), statement="Write it again."), store.secret(task_id))
    assert validate_store(store.root, repeat=1, resume=True).taken_over == 0
    assert task_id in tried


def damage_file(store: TaskStore, task: Task) -> Path | None:
    slug = store.record(task.task_id).repository_record
    return find_blob(store.root / "objects", store.repository(slug).files[task.path])


def damage_record(store: TaskStore, task: Task) -> Path | None:
    return store.root / "secrets" / f"{task.task_id}.json.zst"


@pytest.mark.parametrize(("place", "num_tried"), [(damage_file, 4), (damage_record, 1)])
def test_a_task_that_was_damaged_since_is_tried_again(
    store: TaskStore, place: Callable[[TaskStore, Task], Path | None], num_tried: int
) -> None:
    """The manifest is as it was: what is read once more is the bytes."""
    note(store, *store.task_ids())
    (task,) = [task for task in store.tasks() if task.symbol == "clamp"]
    path = place(store, task)
    assert path is not None
    path.write_bytes(b"changed")
    summary = validate_store(store.root, repeat=1, resume=True)
    assert summary.taken_over == 4 - num_tried
    assert "damaged" in {row.gate for row in summary.failed if row.task_id == task.task_id}


def test_a_line_that_cannot_be_read_is_a_task_that_is_tried(store: TaskStore, tried: list[str]) -> None:
    first, second, *_ = store.task_ids()
    path = note(store, first, second)
    torn = path.read_bytes()[:-9]
    path.write_bytes(b"\xff\xfe\n[]\n" + b"[" * 100_000 + b'\n{"task_id": "absent--1"}\n' + torn)
    assert validate_store(store.root, repeat=1, resume=True).taken_over == 1
    assert second in tried
    assert validate_store(store.root, repeat=1, resume=True).taken_over == 4  # nothing was written onto it


def test_pruning_the_cache_leaves_a_journal_in_use(store: TaskStore) -> None:
    path = note(store, *store.task_ids())
    with passed_tasks(key_of(store), store.task_ids(), resume=True) as journal:
        pruned = cache_module.prune(cache_folder())
        assert [(kept.path, kept.reason) for kept in pruned.kept if kept.path == path] == [(path, "in use")]
        assert len(journal.taken_over) == 4
    assert path in [entry.path for entry in cache_module.prune(cache_folder()).removed]
    assert not path.exists()


def test_two_validations_of_one_store_write_whole_lines(store: TaskStore) -> None:
    key, ids = key_of(store), store.task_ids()
    with passed_tasks(key, ids, resume=True) as one, passed_tasks(key, ids, resume=True) as other:
        one.add(ids[0])
        other.add(ids[1])
        one.add(ids[2])
    with passed_tasks(key, ids, resume=True) as journal:
        assert journal.taken_over == frozenset(ids[:3])
