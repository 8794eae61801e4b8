"""A store as a few objects that travel, and a copy of it in the cache of a node, which need not share a disk.

The copy is called by the store's fingerprint, is made once a node and checked like any store: every record and file
that is read has the hash that the manifest says. It holds golden code and hidden tests, as the store does: nobody but
its owner may read it, and no sandbox mounts it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.tasks.intake.cache import cache_folder, cache_lock, hold, sha256_of
from composer_replication.tasks.record_folder import FOLDERS
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import NAME, damaged

PIECE_BYTES = 16 * 1024**2
Piece = list[tuple[str, bytes]]
"""Some files: path below the store, content as it lies on the disk."""


@dataclass(frozen=True, slots=True)
class StoreParcel:
    """What a store is made of again on another machine; ``pieces`` are references to ``Piece``s."""

    fingerprint: str
    pieces: tuple[Any, ...]


def parcel_of(
    store: TaskStore, put: Callable[[Piece], Any], *, piece_bytes: int = PIECE_BYTES
) -> StoreParcel:
    """Send a store.

    Args:
        store: whole, and not written to meanwhile.
        put: keeps one piece and gives a reference to it.
        piece_bytes: of a piece, about.
    """
    store.settle()  # the manifest alone says what the copy has
    return StoreParcel(store.fingerprint, tuple(put(piece) for piece in _pieces(store.root, piece_bytes)))


def open_copy(parcel: StoreParcel, fetch: Callable[[Any], Piece], *, backend: str | None) -> TaskStore:
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


def _pieces(root: Path, piece_bytes: int) -> Iterator[Piece]:
    """All files that belong to the store, the manifest last: with it a copy is whole."""
    found = (path for name in ("objects", *FOLDERS) for path in sorted((root / name).rglob("*")))
    piece: Piece = []
    num_bytes = 0
    for path in (*(path for path in found if path.is_file()), root / NAME):
        piece.append((path.relative_to(root).as_posix(), path.read_bytes()))
        num_bytes += len(piece[-1][1])
        if num_bytes >= piece_bytes:
            yield piece
            piece, num_bytes = [], 0
    if piece:
        yield piece


def _write(root: Path, parcel: StoreParcel, fetch: Callable[[Any], Piece]) -> None:
    shutil.rmtree(root, ignore_errors=True)  # what a writer left that was killed
    root.mkdir(parents=True)
    root.chmod(0o700)
    for reference in parcel.pieces:
        for name, data in fetch(reference):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.new")
            temporary.write_bytes(data)
            temporary.replace(path)
