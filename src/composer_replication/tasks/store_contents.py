"""Which files belong to a store, and which lie in its folder without a name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.tasks.blobs import SUFFIX, find_blob
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.store_manifest import damaged, read_content

if TYPE_CHECKING:
    from composer_replication.tasks.store import TaskStore


def named_blobs(store: TaskStore, records: Collection[str]) -> set[str]:
    """The sha256 of every content that one of the records names; each of them is read.

    Raises:
        InputError: a record is damaged (CR0411).
    """
    found: set[str] = set()
    for name in sorted(records):
        kind, _, stem = name.removesuffix(".json").partition("/")
        if kind == "repositories":
            found.add(store.baseline_blob(stem))
            found.update(store.repository(stem).files.values())
        elif kind == "tasks":
            store.record(stem)
        elif kind == "secrets":
            found.update((store.secret(stem).twins or {}).values())
        elif kind == "locks":
            lock = store.environment_lock(stem)
            found.update(wheel.sha256 for wheel in (*lock.wheels, lock.installer))
    return found


def sweep_records(root: Path, folders: Collection[str], records: Collection[str]) -> None:
    """Remove what lies in the folders of records and is none of them: a crash leaves such files."""
    for folder in folders:
        for path in [path for path in (root / folder).glob("*") if path.is_file()]:
            if f"{folder}/{path.name.removesuffix(SUFFIX)}" not in records:
                path.unlink()


def read_named(objects: Path, digest: str) -> bytes:
    """The bytes with that sha256.

    Raises:
        InputError: absent or changed (CR0411).
    """
    path = find_blob(objects, digest) or objects / digest[:2] / digest
    data = read_content(path)
    if sha256_of(data) != digest:
        raise damaged(path, f"its sha256 is {sha256_of(data)}")
    return data


def size_of(root: Path, names: Collection[str]) -> int:
    """Bytes of some files, and of all files in some folders."""
    places = [root / name for name in names]
    files = [path for place in places for path in (place, *place.rglob("*")) if path.is_file()]
    return sum(path.stat().st_size for path in files)
