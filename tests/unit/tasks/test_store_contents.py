"""A store holds what its records name, small and the same every time; a crash at any write leaves one that can be read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.tasks import store_manifest
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import compress, decompress, find_blob

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
    store.drop_task("t-class-body")
    store.drop_task("t-class-body")  # a second time changes nothing
    assert store.task_ids() == ["t-feature-body"]
    store.drop_records(
        {"repositories/tinymath-1.0.json", "tasks/t-feature-body.json", "secrets/t-feature-body.json"}
    )
    assert [has(store, shared), has(store, other)] == [True, False]
    store.drop_task("t-feature-body")
    store.drop_records({"repositories/tinymath-1.0.json"})
    assert not has(store, shared)
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


class Writes:
    """Every write of a store by the name of its file; ``crash_at`` crashes before or after one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, crash_at: int = -1, when: str = "") -> None:
        self.names: list[str] = []
        self.crash_at, self.when = crash_at, when
        monkeypatch.setattr(store_manifest, "write_atomic", self.noted(store_manifest.write_atomic))

    def noted(self, real: Callable[..., None]) -> Callable[..., None]:
        def write(path: Path, data: object) -> None:
            self.names.append(path.name)
            is_now = len(self.names) == self.crash_at + 1
            if is_now and self.when == "before":
                raise Crash
            real(path, data)
            if is_now:
                raise Crash

        return write


UPDATE = ["unsettled", "t-function-body.json.zst", "t-function-body.json.zst"]
"""It is noted that records change, and both of the task, which are gone meanwhile, are written: the secret first."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(len(UPDATE)))
def test_a_crash_at_any_write_of_an_update_leaves_a_store_that_can_be_read(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch, number: int, when: str
) -> None:
    store.settle()
    task_id = "t-function-body"
    record, secret = replace(store.record(task_id), strength=STRENGTH), store.secret(task_id)
    writes = Writes(monkeypatch, number, when)
    with pytest.raises(Crash):
        store.put_task(record, replace(secret, twins={}))
    assert writes.names == UPDATE[: number + 1]
    monkeypatch.undo()
    torn = TaskStore.open(store.root)
    torn.verify()
    is_old, is_new = number == 0, (number, when) == (2, "after")
    assert torn.has_record(f"tasks/{task_id}.json") is (is_old or is_new)
    if is_old or is_new:
        assert torn.record(task_id).strength == (STRENGTH if is_new else None)
        assert torn.get(task_id).task_id == task_id
    torn.put_task(record, replace(store.secret("t-class-body"), task_id=task_id, twins={}))
    TaskStore.open(store.root).verify()


@pytest.mark.parametrize("number", range(2))
def test_a_crash_while_a_task_is_dropped_leaves_none_without_its_secret(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store.settle()
    real, dropped = Path.unlink, 0

    def unlink(path: Path, **options: bool) -> None:
        nonlocal dropped
        if dropped == number:
            raise Crash
        dropped += 1
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(Crash):
        store.drop_task("t-class-body")
    monkeypatch.undo()
    torn = TaskStore.open(store.root)
    torn.verify()
    assert [torn.get(task_id).task_id for task_id in torn.task_ids()] == torn.task_ids()
    assert ("t-class-body" in torn.task_ids()) is (number == 0)


def test_while_it_is_written_a_store_is_what_lies_in_its_folders(store: TaskStore) -> None:
    store.settle()
    record, secret = store.record("t-class-body"), store.secret("t-class-body")
    store.put_task(replace(record, strength=STRENGTH), secret)
    store.drop_task("t-feature-body")
    (store.root / "tasks" / ".t-x.json.zst.17.tmp").write_bytes(b"a torn write is none")
    assert (store.root / "unsettled").exists()
    seen = TaskStore.open(store.root)
    assert (seen.fingerprint, seen.task_ids()) == (store.fingerprint, ["t-class-body", "t-function-body"])
    assert seen.record("t-class-body").strength == STRENGTH
    seen.settle()
    assert not (store.root / "unsettled").exists()
    assert TaskStore.open(store.root).fingerprint == store.fingerprint
    store.put_task(record, secret)  # whoever settled it meanwhile, this is noted again
    assert TaskStore.open(store.root).record("t-class-body").strength is None


def test_an_update_that_changes_nothing_writes_nothing(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.settle()
    writes = Writes(monkeypatch)
    record, secret = store.record("t-class-body"), store.secret("t-class-body")
    store.put_task(record, secret)
    assert writes.names == []
    store.put_task(replace(record, strength=STRENGTH), secret)
    assert writes.names == ["unsettled", *["t-class-body.json.zst"] * 2], "a real update is seen"


def test_what_a_build_writes_grows_with_its_tasks_and_not_with_their_square(
    make_store: MakeStore, sized_tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task is put, given its twins and its strength, as a build does."""
    store = make_store(sized_tasks["t-class-body"])
    record, secret = store.record("t-class-body"), store.secret("t-class-body")
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a disk's business, and slow
    num_writes = []
    for num_tasks in (20, 40):
        store.drop_records({"repositories/tinymath-1.0.json"})
        store.settle()
        with monkeypatch.context() as patch:
            writes = Writes(patch)
            for number in range(num_tasks):
                name = f"t-{number:03d}"
                own, hidden = replace(record, task_id=name), replace(secret, task_id=name)
                store.put_task(own, hidden)
                store.put_task(own, replace(hidden, twins={}))
                store.put_task(replace(own, strength=STRENGTH), replace(hidden, twins={}))
            store.settle()
        assert writes.names.count("manifest.json") == 1
        num_writes.append(len(writes.names) - 2)
    assert num_writes == [20 * 6, 40 * 6]


# --- bytes go in and come out; what lies on disk is no bomb ---


@given(st.binary(max_size=5000))
def test_what_went_in_comes_out(data: bytes) -> None:
    assert decompress(compress(data)) == data
    assert zstandard.ZstdDecompressor().decompress(compress(data)) == data
    assert zstandard.frame_content_size(compress(data)) == len(data)


def test_the_name_is_the_hash_of_the_content_and_what_is_compressed_already_stays_as_it_is(
    tmp_path: Path,
) -> None:
    store, data = TaskStore.create(tmp_path), b"x = 1\n" * 1000
    digest, wheel = store.put_blob(data), store.put_blob(b"a wheel", is_packed=True)
    assert digest == hashlib.sha256(data).hexdigest()
    path = tmp_path / "objects" / digest[:2] / f"{digest}.zst"
    assert path.stat().st_size < 100
    assert store.blob(digest) == data
    assert (tmp_path / "objects" / wheel[:2] / wheel).read_bytes() == b"a wheel"
    assert store.put_blob(b"a wheel") == wheel
    assert list(tmp_path.rglob("*.zst")) == [path]


BOMB = compress(b"\0" * 2_000_000)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (BOMB, "unpacks to 2000000 bytes, more than 1999999"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"x"), "does not say how large"),
        *((data, "zstd|does not say") for data in (b"", b"no zstd", compress(b"x" * 100)[:-3])),
        *((compress(b"x") + more, "zstd") for more in (b"more", compress(b"y"))),
    ],
)
def test_a_bomb_and_what_is_no_whole_frame_are_refused(data: bytes, said: str) -> None:
    assert len(decompress(BOMB)) == 2_000_000
    with pytest.raises(ValueError, match=said):
        decompress(data, max_bytes=1_999_999)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b"no zstd", "it is not zstd data"),
        (compress(b"something else"), "its sha256 is"),
        (zstandard.ZstdCompressor().compress(b"\0" * (65 * 1024**2)), "unpacks to 68157440 bytes"),
    ],
)
def test_a_store_names_the_damaged_blob(tmp_path: Path, damage: bytes, said: str) -> None:
    store = TaskStore.create(tmp_path / "store")
    digest = store.put_blob(b"x = 1\n")
    min((store.root / "objects").rglob("*.zst")).write_bytes(damage)
    with pytest.raises(InputError, match="CR0411") as caught:
        store.blob(digest)
    assert said in caught.value.message
    assert digest in caught.value.where
