"""A store holds what its records name, and a crash at any write leaves one that can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from composer_replication.tasks import blobs
from composer_replication.tasks.blobs import find_blob
from composer_replication.tasks.store import TaskStore

PIN = "tinymath/numbers.py::clamp"
MakeStore = Callable[..., TaskStore]

STRENGTH = {"mutants": 1, "killed_visible": 0, "killed_all": 1}


def with_twin(store: TaskStore, task_id: str, data: bytes) -> str:
    """Give a task a twin; nobody reads what it says."""
    digest = store.put_blob(data, is_packed=True)
    store.put_task(store.record(task_id), replace(store.secret(task_id), twins={PIN: digest}))
    return digest


@pytest.fixture
def store(make_store: MakeStore, sized_tasks) -> TaskStore:
    return make_store(*(sized_tasks[name] for name in ("t-function-body", "t-feature-body", "t-class-body")))


def has(store: TaskStore, digest: str) -> bool:
    return find_blob(store.root / "objects", digest) is not None


def test_a_twin_goes_with_the_last_task_that_names_it(store: TaskStore) -> None:
    shared = with_twin(store, "t-function-body", b"shared")
    assert with_twin(store, "t-feature-body", b"shared") == shared
    other = with_twin(store, "t-class-body", b"other")
    store.drop_task("t-function-body")
    assert [has(store, shared), has(store, other)] == [True, True]
    store.drop_task("t-feature-body")
    assert [has(store, shared), has(store, other)] == [False, True]
    store.drop_task("t-feature-body")  # a second time changes nothing
    store.drop_task("t-class-body")
    assert not has(store, other)
    assert not store.task_ids()
    assert all(has(store, digest) for digest in store.repository("tinymath-1.0").files.values())
    assert list((store.root / "secrets").iterdir()) == []


def test_what_no_record_names_is_swept(store: TaskStore) -> None:
    kept, dropped = (with_twin(store, f"t-{name}", name.encode()) for name in ("class-body", "feature-body"))
    unnamed = [store.put_blob(b"left by a crash"), store.put_blob(b"and this", is_packed=True)]
    (store.root / "objects" / kept[:2] / ".half.123.tmp").write_bytes(b"half")
    (store.root / "tasks" / "gone.json").write_text("{}")
    before = {name: store.blob(name) for name in store.repository("tinymath-1.0").files.values()}
    keep = {f"{kind}/t-class-body.json" for kind in ("tasks", "secrets")} | {"repositories/tinymath-1.0.json"}
    store.drop_records(keep)
    assert has(store, kept)
    assert not any(has(store, digest) for digest in (dropped, *unnamed))
    names = {path.name for path in store.root.rglob("*") if path.is_file()}
    assert not names & {".half.123.tmp", "gone.json", "t-feature-body.json"}
    again = TaskStore.open(store.root)
    again.verify()
    assert again.task_ids() == ["t-class-body"]
    assert {name: again.blob(name) for name in before} == before


class Crash(BaseException):
    pass


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(4))
def test_a_crash_at_any_write_of_an_update_leaves_a_store_that_can_be_read(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    """Four writes: the manifest without the task, its two records, the manifest with them."""
    real, writes = blobs.write_atomic, []

    def crash(path: Path, data: str | bytes) -> None:
        writes.append(path.name)
        if len(writes) == number + 1 and when == "before":
            raise Crash
        real(path, data)
        if len(writes) == number + 1:
            raise Crash

    monkeypatch.setattr(blobs, "write_atomic", crash)
    monkeypatch.setattr("composer_replication.tasks.store_manifest.write_atomic", crash)
    task_id = "t-function-body"
    record = replace(store.record(task_id), strength=STRENGTH)
    with pytest.raises(Crash):
        store.put_task(record, replace(store.secret(task_id), twins={}))
    monkeypatch.undo()
    torn = TaskStore.open(store.root)
    torn.verify()
    is_old, is_new = (number, when) == (0, "before"), (number, when) == (3, "after")
    assert torn.has_record(f"tasks/{task_id}.json") is (is_old or is_new)
    if is_old or is_new:
        assert torn.record(task_id).strength == (STRENGTH if is_new else None)
    torn.put_task(record, replace(store.secret("t-class-body"), task_id=task_id, twins={}))
    TaskStore.open(store.root).verify()


def test_an_update_that_changes_nothing_writes_nothing(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[str] = []
    for module in ("blobs", "store_manifest"):
        monkeypatch.setattr(
            f"composer_replication.tasks.{module}.write_atomic", lambda path, _: writes.append(path.name)
        )
    record, secret = store.record("t-class-body"), store.secret("t-class-body")
    store.put_task(record, secret)
    assert writes == []
    store.put_task(replace(record, strength=STRENGTH), secret)
    assert writes == ["manifest.json", "t-class-body.json.zst", "manifest.json"], "a real update is seen"
