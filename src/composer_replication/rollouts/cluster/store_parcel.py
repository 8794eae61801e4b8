"""A store as one object that travels, and a copy of it in the cache of a node, which need not share a disk.

The copy is called by the store's fingerprint, is made once a node and checked like any store: every record and file
that is read has the hash that the manifest says. It holds golden code and hidden tests, as the store does: nobody but
its owner may read it, and no sandbox mounts it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold, sha256_of
from composer_replication.tasks.record_folder import FOLDERS
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import NAME, damaged

Files = list[tuple[str, bytes]]
"""Path below the store, content as it lies on the disk; the manifest last: with it a copy is whole."""


@dataclass(frozen=True, slots=True)
class StoreParcel:
    """What a store is made of again on another machine; ``files`` is a reference to its ``Files``."""

    fingerprint: str
    files: Any


def parcel_of(store: TaskStore, put: Callable[[Files], Any]) -> StoreParcel:
    """Send a store, whole and not written to meanwhile; ``put`` keeps its files and gives a reference to them."""
    store.settle()  # the manifest alone says what the copy has
    found = (path for name in ("objects", *FOLDERS) for path in sorted((store.root / name).rglob("*")))
    paths = (*(path for path in found if path.is_file()), store.root / NAME)
    files = [(path.relative_to(store.root).as_posix(), path.read_bytes()) for path in paths]
    return StoreParcel(store.fingerprint, put(files))


def open_copy(parcel: StoreParcel, fetch: Callable[[Any], Files], *, backend: str | None) -> TaskStore:
    """The store on this machine, made first where it is absent.

    Raises:
        InputError: what came, or what lies there, is not that store (CR0411).
    """
    key = sha256_of(f"copy of {parcel.fingerprint}".encode())[:16]
    root = cache_folder() / "task-stores" / key
    while not (hold(root) and (root / NAME).is_file()):
        with cache_lock(f"task-store-{key}"):
            if not (root / NAME).is_file():
                _write(root, parcel, fetch)
    store = TaskStore.open(root, backend=backend)
    if store.fingerprint != parcel.fingerprint:
        raise damaged(root, "it is another one than was sent")
    return store


def _write(root: Path, parcel: StoreParcel, fetch: Callable[[Any], Files]) -> None:
    shutil.rmtree(root, ignore_errors=True)  # what a writer left that was killed
    root.mkdir(parents=True)
    root.chmod(0o700)
    for name, data in fetch(parcel.files):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_bytes(data)
        temporary.replace(path)
