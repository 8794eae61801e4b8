"""Tasks on disk: content-addressed files, public records, and secrets apart from them.

    manifest.json              schema version, sha256 of every record, one fingerprint over all
    objects/ab/<sha256>.zst    files of repositories, by the hash of their content; wheels as they are
    repositories/<slug>.json   paths and hashes of one repository, its green tests
    locks/<fingerprint>.json   the wheels of an environment, so that it can be made offline
    tasks/<task_id>.json       what may be known of a task
    instructions/<task_id>.json  what a model wrote about a task, where one was asked
    secrets/<task_id>.json     golden body and hidden tests
    journal.jsonl              what became of each candidate, so that a build can go on
    tasks.parquet, secrets.parquet   the tasks once more, in the shape of SWE-bench; see ``parquet``

There is no time stamp in it: the same input and seed give the same bytes. No folder of
the store is ever mounted into a sandbox; trees are written out file by file.
"""

from __future__ import annotations

import difflib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from composer_replication.errors import InputError, UsageError
from composer_replication.records import Task, TaskContent
from composer_replication.run_folder import SCHEMA_VERSION, write_atomic
from composer_replication.tasks.blobs import find_blob, read_blob, write_blob
from composer_replication.tasks.fresh_git import with_git
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.environment import Environment, open_environment
from composer_replication.tasks.intake.lock import EnvironmentLock, LockedWheel
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.store_manifest import (
    damaged,
    fingerprint_of,
    read_manifest,
    write_manifest,
)
from composer_replication.tasks.store_records import RepositoryRecord, SecretRecord, TaskRecord
from composer_replication.tasks.test_functions import function_texts
from composer_replication.tasks.twin.twin_records import Twin, read_twin
from composer_replication.tasks.views import VIEWS, Changes, View, view_files, write_files

Record = TypeVar("Record")
_BASELINE = ("contexts", "places")
_FOLDERS = ("instructions", "locks", "repositories", "tasks", "secrets")


class TaskStore:
    """One folder of tasks. Use ``create`` or ``open``.

    Every record that is read is checked against the manifest, every file against the
    hash that is its name. Safe to use from several threads.
    """

    def __init__(
        self, root: Path, records: dict[str, str], backend: str | None, derived: dict[str, str] | None = None
    ) -> None:
        self.root = root.resolve()
        self._objects = self.root / "objects"
        self.backend = backend
        self._records = records
        self._derived = derived or {}
        self._lock = threading.RLock()
        self._parsed: dict[str, Mapping[str, Any]] = {}
        self._environments: dict[str, Environment] = {}
        self._repositories: dict[str, RepositoryRecord] = {}
        self._test_functions: dict[str, dict[tuple[int, str], str]] = {}

    @classmethod
    def create(cls, path: Path, *, backend: str | None = None) -> TaskStore:
        """A store to write to: a new one, or the one that an earlier build left.

        Raises:
            UsageError: the folder holds something else (CR0415).
            InputError: the store in it is damaged (CR0411).
        """
        if (path / "manifest.json").exists():
            return cls.open(path, backend=backend)
        if path.is_dir() and any(item.name not in ("LOCK", "objects", *_FOLDERS) for item in path.iterdir()):
            raise UsageError(
                "CR0415",
                "the folder is not empty and not a task store.",
                where=str(path),
                fix="choose another --out DIR.",
            )
        path.mkdir(parents=True, exist_ok=True)
        store = cls(path, {}, backend)
        store._write_manifest()
        return store

    @classmethod
    def open(cls, path: Path, *, backend: str | None = None) -> TaskStore:
        """A store to read.

        Args:
            path: its folder.
            backend: sandbox backend in which environments are installed when absent.

        Raises:
            InputError: not a task store (CR0410), or damaged or of another version (CR0411).
        """
        records, derived = read_manifest(Path(path))
        return cls(Path(path), records, backend, derived)

    @property
    def fingerprint(self) -> str:
        """sha256 over the names and hashes of all records."""
        with self._lock:
            return fingerprint_of(self._records)

    # --- reading ---------------------------------------------------------------------

    def task_ids(self) -> list[str]:
        """All task ids, sorted."""
        with self._lock:
            return sorted(name[6:-5] for name in self._records if name.startswith("tasks/"))

    def tasks(self) -> list[Task]:
        """All tasks, in the order of their ids.

        Raises:
            InputError: a record is damaged (CR0411).
        """
        return [self.get(task_id) for task_id in self.task_ids()]

    def get(self, task_id: str) -> Task:
        """One task.

        Raises:
            InputError: no such task, the nearest id is named (CR0412); damaged (CR0411).
        """
        ids = self.task_ids()
        if task_id not in ids:
            near = difflib.get_close_matches(task_id, ids, n=1, cutoff=0.0)
            hint = f"the nearest is {near[0]}." if near else "the store has no tasks."
            raise InputError("CR0412", f"there is no task {task_id!r}.", where=str(self.root), fix=hint)
        record = self.record(task_id)
        return record.to_task(self.secret(task_id), self.repository(record.repository_record))

    def record(self, task_id: str) -> TaskRecord:
        return self.read_record(f"tasks/{task_id}.json", TaskRecord.from_json)

    def secret(self, task_id: str) -> SecretRecord:
        return self.read_record(f"secrets/{task_id}.json", SecretRecord.from_json)

    def repository(self, slug: str) -> RepositoryRecord:
        name = f"repositories/{slug}.json"
        with self._lock:
            digest = self._records.get(name, "")
            if digest not in self._repositories:
                self._repositories[digest] = self.read_record(name, self._whole_repository)
            return self._repositories[digest]

    def _whole_repository(self, value: Mapping[str, Any]) -> RepositoryRecord:
        return RepositoryRecord.from_json({**value, **json.loads(self.blob(value["baseline"]))})

    def repositories(self) -> list[RepositoryRecord]:
        """All repositories, also those that gave no task, by name."""
        with self._lock:
            slugs = sorted(name[13:-5] for name in self._records if name.startswith("repositories/"))
        return [self.repository(slug) for slug in slugs]

    def environment_lock(self, fingerprint: str) -> EnvironmentLock:
        return self.read_record(f"locks/{fingerprint}.json", EnvironmentLock.from_json)

    def read_record(self, name: str, from_json: Callable[[Mapping[str, Any]], Record]) -> Record:
        value = self._read(name)
        try:
            return from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(
                self.root / name, f"the record cannot be read, {type(error).__name__}: {error}"
            ) from error

    def has_record(self, name: str) -> bool:
        with self._lock:
            return name in self._records

    def broken_text(self, task: Task) -> str:
        """The file with the hole; ``task.hole`` counts its characters. For tasks of one hole."""
        return self.files(task, "rollout")[task.hole.path].decode()

    def golden_body(self, task: Task) -> str:
        """The deleted code, span after span, removed files last. Never to be shown to a policy."""
        record = self.record(task.task_id)
        paths = {edit.path for edit in record.edits} | set(record.removed_files)
        texts = {path: self._original(record, path).decode("utf-8", "replace") for path in paths}
        spans = [texts[edit.path][edit.start : edit.end] for edit in record.edits]
        return "\n".join([*spans, *(texts[path] for path in record.removed_files)])

    def _original(self, record: TaskRecord, path: str) -> bytes:
        files = self.repository(record.repository_record).files
        if path not in files:
            raise damaged(self.root / f"tasks/{record.task_id}.json", f"{path} is not in its repository")
        return self.blob(files[path])

    def twins(self, task: Task) -> dict[str, Twin]:
        """The recorded behaviour of its functions, by pin. Never to enter a sandbox of a policy's tools.

        Raises:
            InputError: one is damaged (CR0411, CR0471).
        """
        known = self.secret(task.task_id).twins or {}
        return {pin: read_twin(self.blob(digest), where=task.task_id) for pin, digest in known.items()}

    def content(self, task: Task) -> TaskContent:
        """Everything a task is made of, for overlap checks only."""
        files = {name: data.decode("utf-8", "replace") for name, data in self.files(task, "hidden").items()}
        return TaskContent(
            task_id=task.task_id,
            repository=task.repository,
            symbol=task.symbol,
            broken_tree={name: text for name, text in files.items() if not is_test_path(name)},
            tests={name: text for name, text in files.items() if is_test_path(name)},
            golden=self.golden_body(task),
            own_tests=self._own_tests(task),
        )

    def _own_tests(self, task: Task) -> str:
        """The source of the test functions that fail without the golden body."""
        repository = self.repository(self.record(task.task_id).repository_record)
        places = sorted({repository.places[test] for test in task.fail_to_pass if test in repository.places})
        found = []
        for path, line, name in places:
            digest = repository.files.get(path, "")
            if digest and digest not in self._test_functions:
                self._test_functions[digest] = function_texts(self.blob(digest).decode("utf-8", "replace"))
            found.append(self._test_functions.get(digest, {}).get((line, name), ""))
        return "\n".join(text for text in found if text)

    def files(self, task: Task, view: View) -> dict[str, bytes]:
        """The files of a view of a task by path; see ``views``."""
        if view not in VIEWS:
            raise ValueError(f"{view!r} is not one of {', '.join(VIEWS)}")
        record = self.record(task.task_id)
        changes = Changes(record.edits, record.removed_files, record.test_edits, record.visible_edits)
        try:
            return view_files(self.repository_files(record.repository_record), changes, view)
        except ValueError as error:
            raise damaged(
                self.root / f"tasks/{task.task_id}.json", f"its edits do not fit: {error}"
            ) from error

    def repository_files(self, slug: str) -> dict[str, bytes]:
        """All original files of a repository by path."""
        return {path: self.blob(digest) for path, digest in self.repository(slug).files.items()}

    def write_tree(self, task: Task, folder: Path, view: View = "rollout") -> None:
        """Write a private copy of a view into ``folder``, which is made if absent; a rollout's has a fresh ``.git``."""
        folder.mkdir(parents=True, exist_ok=True)
        files = self.files(task, view)
        write_files(folder, with_git(files) if view == "rollout" else files)

    def environment(self, task: Task) -> Environment:
        """The environment in which the task's tests run; installed from the store's own wheels if absent.

        Raises:
            InputError: it does not fit this machine, or is damaged (CR0408, CR0411, CR0413, CR0414).
            SandboxFailure: the sandbox broke.
        """
        return self.environment_of(task.environment)

    def environment_of(self, fingerprint: str) -> Environment:
        with self._lock:
            if fingerprint not in self._environments:
                lock = self.environment_lock(fingerprint)
                self._environments[fingerprint] = open_environment(
                    lock, backend=self.backend, read_wheel=self._read_wheel
                )
            return self._environments[fingerprint]

    def _read_wheel(self, wheel: LockedWheel) -> bytes:
        return self.blob(wheel.sha256)

    def blob(self, digest: str) -> bytes:
        """The bytes with that sha256.

        Raises:
            InputError: absent or changed (CR0411).
        """
        path = find_blob(self._objects, digest)
        if path is None:
            raise damaged(self._objects / digest[:2] / digest, "it is missing")
        try:
            data = read_blob(path)
        except (OSError, ValueError) as error:
            raise damaged(path, str(error).rstrip(".")) from error
        if sha256_of(data) != digest:
            raise damaged(path, f"its sha256 is {sha256_of(data)}")
        return data

    def _read(self, name: str) -> Mapping[str, Any]:
        with self._lock:
            if name not in self._parsed:
                path = self.root / name
                try:
                    data = path.read_bytes()
                except OSError as error:
                    raise damaged(path, "it is missing") from error
                if sha256_of(data) != self._records.get(name):
                    raise damaged(
                        path, f"its sha256 is {sha256_of(data)}, the manifest says {self._records.get(name)}"
                    )
                try:
                    self._parsed[name] = json.loads(data)
                except ValueError as error:
                    raise damaged(path, "it is not JSON") from error
            return self._parsed[name]

    def num_bytes(self) -> int:
        """Size of everything that belongs to the store."""
        folders = (self.root / name for name in ("objects", *_FOLDERS))
        inside = (path for folder in folders for path in folder.rglob("*") if path.is_file())
        top = (self.root / name for name in ("manifest.json", *self.derived))
        return sum(path.stat().st_size for path in (*top, *inside))

    @property
    def derived(self) -> Mapping[str, str]:
        """Files that follow from the records, by sha256; the fingerprint does not cover them."""
        with self._lock:
            return dict(self._derived)

    def read_derived(self, name: str) -> bytes:
        """One of them.

        Raises:
            InputError: missing or changed (CR0411).
        """
        try:
            data = (self.root / name).read_bytes()
        except OSError as error:
            raise damaged(self.root / name, "it is missing") from error
        if sha256_of(data) != self.derived.get(name):
            raise damaged(self.root / name, f"its sha256 is {sha256_of(data)}")
        return data

    def verify(self) -> None:
        """Read every record, every file that a record names, and the derived files.

        Raises:
            InputError: the first one that is damaged, by name (CR0411).
        """
        for name in sorted(self._records):
            self._read(name)
        for digest in sorted(set(self._digests())):
            self.blob(digest)
        for name in sorted(self.derived):
            self.read_derived(name)

    def _digests(self) -> Iterator[str]:
        for name in sorted(self._records):
            kind, _, stem = name.removesuffix(".json").partition("/")
            if kind == "repositories":
                yield str(self._read(name)["baseline"])
                yield from self.repository(stem).files.values()
            elif kind == "tasks":
                self.record(stem)
            elif kind == "secrets":
                yield from (self.secret(stem).twins or {}).values()
            elif kind == "locks":
                lock = self.environment_lock(stem)
                yield from (wheel.sha256 for wheel in (*lock.wheels, lock.installer))

    # --- writing ---------------------------------------------------------------------

    def put_blob(self, data: bytes, *, is_packed: bool = False) -> str:
        """Keep some bytes; their sha256. ``is_packed`` says that they are compressed already."""
        return write_blob(self._objects, data, is_packed=is_packed)

    def put_lock(self, lock: EnvironmentLock, read_wheel: Any) -> None:
        for wheel in (*lock.wheels, lock.installer):
            if find_blob(self._objects, wheel.sha256) is None:
                self.put_blob(read_wheel(wheel), is_packed=True)
        self.put_record(f"locks/{lock.fingerprint}.json", lock.to_json())

    def put_repository(self, slug: str, record: RepositoryRecord) -> None:
        """Keep a repository; what grows with its tests goes into a blob, which is compressed."""
        value = record.to_json()
        baseline = {name: value.pop(name) for name in _BASELINE}
        digest = self.put_blob(json.dumps(baseline, sort_keys=True, separators=(",", ":")).encode())
        self.put_record(f"repositories/{slug}.json", {**value, "baseline": digest})

    def put_task(self, record: TaskRecord, secret: SecretRecord) -> None:
        self.put_record(f"secrets/{record.task_id}.json", secret.to_json())
        self.put_record(f"tasks/{record.task_id}.json", record.to_json())

    def put_derived(self, name: str, data: bytes) -> None:
        """Keep a file that follows from the records; it is gone as soon as one of them changes."""
        with self._lock:
            write_atomic(self.root / name, data)
            self._derived[name] = sha256_of(data)
            self._write_manifest()

    def _write_changed_manifest(self) -> None:
        """The manifest without derived files first: a crash leaves one that nothing names."""
        stale = list(self._derived)
        self._derived.clear()
        self._write_manifest()
        for name in stale:
            (self.root / name).unlink(missing_ok=True)

    def drop_task(self, task_id: str) -> None:
        self._drop(f"tasks/{task_id}.json")
        self._drop(f"secrets/{task_id}.json")
        self._drop(f"instructions/{task_id}.json")

    def drop_records(self, keep: set[str]) -> None:
        """Forget all records but ``keep`` and the kept tasks' instructions (what an earlier build left)."""
        for name in [name for name in self._records if name.replace("instructions/", "tasks/") not in keep]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        with self._lock:
            self._records.pop(name, None)
            self._parsed.pop(name, None)
            self._write_changed_manifest()
            (self.root / name).unlink(missing_ok=True)

    def put_record(self, name: str, value: Mapping[str, Any]) -> None:
        """Record first, manifest after: a crash between them leaves a file that nothing names."""
        data = (
            json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=1, sort_keys=True) + "\n"
        ).encode()
        with self._lock:
            if self._records.get(name) != sha256_of(data):
                write_atomic(self.root / name, data)
                self._records[name] = sha256_of(data)
                self._parsed.pop(name, None)
                self._write_changed_manifest()

    def _write_manifest(self) -> None:
        write_manifest(self.root, self._records, self._derived)
