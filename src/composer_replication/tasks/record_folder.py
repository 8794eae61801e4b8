"""Records and blobs of one folder, each checked by its hash when it is read.

The manifest and its list of changes have the hash of every record, the name of a blob is its own. What a crash leaves
is never a contradiction: a record is forgotten before it is written anew, and a file that nothing names is swept.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from composer_replication.errors import InputError, UsageError
from composer_replication.run_folder import SCHEMA_VERSION, is_torn_write
from composer_replication.tasks.blobs import (
    SUFFIX,
    drop_file,
    find_blob,
    kept_path,
    write_blob,
    write_file,
)
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.proving_sandbox import ProvingSandbox
from composer_replication.tasks.store_manifest import (
    CHANGES,
    NAME,
    BuildMark,
    Manifest,
    Origin,
    add_changes,
    begin_changes,
    damaged,
    fingerprint_of,
    origin_of,
    read_content,
    read_manifest,
    write_manifest,
)

Record = TypeVar("Record")
FOLDERS = ("instructions", "locks", "repositories", "tasks", "secrets")
TABLES = ("tasks.parquet", "secrets.parquet")
"""What earlier versions wrote beside the records: out of date as soon as one of these changes."""


class RecordFolder:
    """A folder of records and what they name. Use ``create`` or ``open``; safe to use from several threads."""

    def __init__(self, root: Path, records: dict[str, str], backend: str | None) -> None:
        self.root = root.resolve()
        self._objects = self.root / "objects"
        self.backend = backend
        self._records = records
        self._lock = threading.RLock()
        self._parsed: dict[str, Mapping[str, Any]] = {}
        self._build: BuildMark | None = None
        self._proved_by: tuple[ProvingSandbox, ...] = ()
        self._is_listed = False  # whether a list of changes was begun after the manifest
        self._is_settled = True  # whether the manifest has all changes, or this process began their list

    @classmethod
    def create(cls, path: Path, *, backend: str | None = None) -> Self:
        """A store to write to: a new one, or the one that an earlier build left.

        Raises:
            UsageError: the folder holds something else (CR0231).
            InputError: the store in it is damaged (CR0411).
        """
        refuse_other_content(path)
        if (path / NAME).exists():
            return cls.open(path, backend=backend)
        path.mkdir(parents=True, exist_ok=True)
        store = cls(path, {}, backend)
        store._write_manifest()
        return store

    @classmethod
    def open(cls, path: Path, *, backend: str | None = None) -> Self:
        """A store to read.

        Args:
            path: its folder.
            backend: sandbox backend in which environments are installed when absent.

        Raises:
            InputError: not a task store (CR0411), or damaged or of another version (CR0411).
        """
        manifest = read_manifest(Path(path))
        store = cls(Path(path), manifest.records, backend)
        store._build, store._proved_by = manifest.build, manifest.proved_by
        store._is_settled = manifest.is_settled
        return store

    @property
    def build(self) -> BuildMark | None:
        """Whether its build came to its end; None where that was not noted, as by earlier versions."""
        with self._lock:
            return self._build

    def mark_build(self, mark: BuildMark) -> None:
        """Note that a build begins, or that it came to its end."""
        with self._lock:
            self._build = mark
            self._write_manifest()

    @property
    def proved_by(self) -> tuple[ProvingSandbox, ...]:
        """The sandboxes in which its builds judged; none where that was not noted, as by earlier versions."""
        with self._lock:
            return self._proved_by

    def note_proof(self, sandbox: ProvingSandbox) -> None:
        """Note that a build judges in this sandbox. The fingerprint does not cover it: it says what the tasks are."""
        with self._lock:
            if sandbox not in self._proved_by:
                self._proved_by = tuple(sorted({*self._proved_by, sandbox}))
                self._write_manifest()

    @property
    def fingerprint(self) -> str:
        """sha256 over the names and hashes of all records."""
        with self._lock:
            return fingerprint_of(self._records)

    def read_record(self, name: str, from_json: Callable[[Mapping[str, Any]], Record]) -> Record:
        value = self._read(name)
        try:
            return from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            detail = f"the record cannot be read, {type(error).__name__}: {error}"
            raise damaged(self._record_path(name), detail) from error

    def has_record(self, name: str) -> bool:
        with self._lock:
            return name in self._records

    def blob(self, digest: str) -> bytes:
        """The bytes with that sha256.

        Raises:
            InputError: absent or changed (CR0411).
        """
        return read_named(self._objects, digest)

    def _record_path(self, name: str) -> Path:
        return kept_path(self.root / name)

    def _read(self, name: str) -> Mapping[str, Any]:
        with self._lock:
            if name not in self._parsed:
                path = self._record_path(name)
                data = read_content(path)
                if sha256_of(data) != self._records.get(name):
                    raise damaged(
                        path, f"its sha256 is {sha256_of(data)}, the manifest says {self._records.get(name)}"
                    )
                try:
                    self._parsed[name] = json.loads(data)
                except (ValueError, RecursionError) as error:
                    raise damaged(path, "it is not JSON") from error
            return self._parsed[name]

    def num_bytes(self) -> int:
        """Size of everything that belongs to the store."""
        return size_of(self.root, ("objects", *FOLDERS, NAME, CHANGES))

    def put_blob(self, data: bytes, *, is_packed: bool = False) -> str:
        """Keep some bytes; their sha256. ``is_packed`` says that they are compressed already."""
        return write_blob(self._objects, data, is_packed=is_packed)

    def _drop(self, names: set[str]) -> None:
        known = names & self._records.keys()
        if known:
            self._change(dict.fromkeys(sorted(known)))
            for name in names:
                drop_file(self.root / name)

    def put_record(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep one record, new or instead of an earlier one."""
        self._put_records({name: value})

    def _put_records(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Records first, the list of changes after: a crash between them leaves files that nothing names.

        Records that are there already are forgotten first, for the same reason: a file that is
        named by another hash would be a damaged store.
        """
        rows = {
            name: json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=1, sort_keys=True) + "\n"
            for name, value in values.items()
        }
        digests: dict[str, str | None] = {name: sha256_of(text.encode()) for name, text in rows.items()}
        with self._lock:
            changed = {name for name, digest in digests.items() if self._records.get(name) != digest}
            if not changed:
                return
            if changed & self._records.keys():
                self._change(dict.fromkeys(digests))
            for name in sorted(changed):
                write_file(self.root / name, rows[name].encode())
            self._change(digests)

    def _change(self, changes: Mapping[str, str | None]) -> None:
        """Add to the list of changes, which begins anew where another process left one: its last line may be torn."""
        if not self._is_settled:
            self._write_manifest()
        if not self._is_listed:
            for name in TABLES:
                (self.root / name).unlink(missing_ok=True)
            begin_changes(self.root, self._records)
            self._is_listed = True
        add_changes(self.root, changes)
        for name, digest in changes.items():
            self._parsed.pop(name, None)
            if digest is None:
                self._records.pop(name, None)
            else:
                self._records[name] = digest

    def settle(self) -> None:
        """Write the manifest with all changes; whoever has written many records calls it at the end."""
        with self._lock:
            if self._is_listed or not self._is_settled:
                self._write_manifest()

    def _write_manifest(self) -> None:
        origins = self._origins() if self._build is not None and self._build.is_complete else None
        write_manifest(self.root, Manifest(self._records, self._build, self._proved_by), origins)
        self._is_listed, self._is_settled = False, True

    def _origins(self) -> dict[str, Origin]:
        """Where each repository is from and its licence; one whose record is damaged is left out, its reader says so."""
        found: dict[str, Origin] = {}
        for name in sorted(self._records):
            if name.startswith("repositories/"):
                with contextlib.suppress(InputError):
                    found[name[13:-5]] = origin_of(self._read(name))
        return found


def refuse_other_content(path: Path) -> None:
    """Refuse a folder in which no store can be made or gone on with; nothing is written.

    Raises:
        UsageError: the folder holds something else (CR0231).
        InputError: the manifest in it is damaged or of another version (CR0411).
    """
    own = ("LOCK", "objects", *FOLDERS)
    if (path / NAME).exists():
        read_manifest(path)
    elif path.is_dir() and any(
        item.name not in own and not is_torn_write(item.name) for item in path.iterdir()
    ):
        raise UsageError(
            "CR0231",
            "the folder is not empty and not a task store.",
            where=str(path),
            fix="choose another --out DIR.",
        )


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
