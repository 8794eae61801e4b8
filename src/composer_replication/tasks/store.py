"""Tasks on disk: content-addressed files, public records, and secrets apart from them.

    manifest.json                  schema version, sha256 of every record, one fingerprint over all; the sandbox that
                                   proved the tasks
    unsettled                      is there while records are written that the manifest does not name yet
    objects/ab/<sha256>.zst        files of repositories, by the hash of their content; wheels as they are
    repositories/<slug>.json.zst   paths and hashes of one repository, its green tests
    locks/<fingerprint>.json.zst   the wheels of an environment, so that it can be made offline
    tasks/<task_id>.json.zst       what may be known of a task
    instructions/<task_id>.json.zst  what a model wrote about a task, where one was asked
    secrets/<task_id>.json.zst     hidden tests, and where recorded behaviour is
    journal.jsonl                  what became of each candidate, so that a build can go on

A record is called by its name without ``.zst``, and hashed as it is before it is compressed.
There is no time stamp in it: the same input and seed give the same bytes. No folder of
the store is ever mounted into a sandbox; trees are written out file by file.
"""

from __future__ import annotations

import difflib
import json
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from composer_replication.errors import InputError, NothingToDoError, UsageError
from composer_replication.records import Task, TaskContent
from composer_replication.run_folder import SCHEMA_VERSION, TORN_WRITE
from composer_replication.tasks import store_manifest
from composer_replication.tasks.fresh_git import with_git
from composer_replication.tasks.intake.cache import put_file, sha256_of, tree_bytes
from composer_replication.tasks.intake.environment import (
    Environment,
    EnvironmentLock,
    LockedWheel,
    open_environment,
    wheel_path,
)
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.planning.edits import View, view_files, write_files
from composer_replication.tasks.store_records import RepositoryRecord, SecretRecord, TaskRecord
from composer_replication.tasks.test_functions import function_texts
from composer_replication.tasks.twin.twin_run import Twin, read_twin

Record = TypeVar("Record")
_BASELINE = ("called", "places")


class TaskStore:
    """One folder of tasks. Use ``create`` or ``open``; safe to use from several threads.

    Every record that is read is checked against the manifest, every file against the hash that is its name: each method
    that reads raises an InputError that names what is absent or changed (CR0411). What a crash leaves is never a
    contradiction: the records are those that lie there then, and a file that nothing names is swept.
    """

    def __init__(self, root: Path, manifest: store_manifest.Manifest, backend: str | None) -> None:
        self.root = root.resolve()
        self.backend = backend
        self._objects = self.root / "objects"
        self._manifest = manifest
        self._records = manifest.records
        self._lock = threading.RLock()
        self._parsed: dict[str, dict[Callable[[Mapping[str, Any]], Any], Any]] = {}
        self._environments: dict[str, Environment] = {}

    @classmethod
    def create(cls, path: Path, *, backend: str | None = None) -> Self:
        """A store to write to: a new one, or the one that an earlier build left.

        A folder of anything else (CR0231), and a store that is damaged or of another version (CR0411), stay as they were.
        """
        if not (path / store_manifest.NAME).exists():
            items = path.iterdir() if path.is_dir() else ()
            if any(item.name != "LOCK" and not TORN_WRITE.fullmatch(item.name) for item in items):
                problem, fix = "the folder is not empty and not a task store.", "choose another --out DIR."
                raise UsageError("CR0231", problem, where=str(path), fix=fix)
            store_manifest.write_manifest(path, store_manifest.Manifest({}))
        return cls.open(path, backend=backend)

    @classmethod
    def open(cls, path: Path, *, backend: str | None = None) -> Self:
        """A store to read (else CR0411); ``backend`` is the sandbox in which environments are installed when absent."""
        return cls(Path(path), store_manifest.read_manifest(Path(path)), backend)

    @property
    def proved_by(self) -> tuple[str, ...]:
        """The sandboxes in which its builds judged."""
        return self._manifest.proved_by

    def note_proof(self, sandbox: str) -> None:
        """Note that a build judges in this sandbox. The fingerprint does not cover it: it says what the tasks are."""
        with self._lock:
            if sandbox not in self.proved_by:
                self._manifest.proved_by = tuple(sorted({*self.proved_by, sandbox}))
                store_manifest.write_manifest(self.root, self._manifest)

    @property
    def fingerprint(self) -> str:
        """sha256 over the names and hashes of all records."""
        with self._lock:
            return store_manifest.fingerprint_of(self._records)

    def read_record(self, name: str, from_json: Callable[[Mapping[str, Any]], Record]) -> Record:
        """What ``from_json`` makes of a record; kept, so that it is read once."""
        with self._lock:
            parsed = self._parsed.setdefault(name, {})
            if from_json not in parsed:
                path, wanted = store_manifest.packed_path(self.root / name), self._records.get(name)
                data = store_manifest.read_content(path)
                if sha256_of(data) != wanted:
                    raise store_manifest.damaged(
                        path, f"its sha256 is {sha256_of(data)}, the manifest says {wanted}"
                    )
                try:
                    parsed[from_json] = from_json(json.loads(data))
                except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                    detail = f"the record cannot be read, {type(error).__name__}: {error}"
                    raise store_manifest.damaged(path, detail) from error
            record: Record = parsed[from_json]
            return record

    def has_record(self, name: str) -> bool:
        return name in self._records

    def blob(self, digest: str) -> bytes:
        """The bytes with that sha256."""
        path = store_manifest.find_blob(self._objects, digest) or self._objects / digest[:2] / digest
        data = store_manifest.read_content(path)
        if sha256_of(data) != digest:
            raise store_manifest.damaged(path, f"its sha256 is {sha256_of(data)}")
        return data

    def wheel(self, wheel: LockedWheel) -> bytes:
        """A wheel, from this machine's cache where it is there."""
        path = wheel_path(wheel)
        return path.read_bytes() if path.is_file() else self.blob(wheel.sha256)

    def num_bytes(self) -> int:
        """Size of everything that belongs to the store."""
        return sum(
            tree_bytes(self.root / name) for name in ("objects", *store_manifest.FOLDERS, store_manifest.NAME)
        )

    def put_blob(self, data: bytes, *, is_packed: bool = False) -> str:
        """Keep some bytes once; their sha256.

        What ``is_packed`` is compressed already (a wheel) and kept as it is; so is what is larger than ``MAX_BYTES``.
        """
        digest = sha256_of(data)
        is_packed = is_packed or len(data) > store_manifest.MAX_BYTES
        if store_manifest.find_blob(self._objects, digest) is None:
            path = self._objects / digest[:2] / (digest if is_packed else digest + store_manifest.SUFFIX)
            put_file(path, data if is_packed else store_manifest.compress(data))
        return digest

    def put_record(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep one record, new or instead of an earlier one."""
        self._put_records({name: value})

    def _put_records(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep records that belong together; of earlier ones none stays meanwhile, so that after a crash no two disagree."""
        rows = {
            name: json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=1, sort_keys=True) + "\n"
            for name, value in values.items()
        }
        digests = {name: sha256_of(text.encode()) for name, text in rows.items()}
        with self._lock:
            if digests.items() <= self._records.items():
                return
            self._drop(set(rows))
            for name in sorted(rows):  # the secret before the task, which counts once it is there
                store_manifest.write_file(self.root / name, rows[name].encode())
            self._records |= digests

    def _drop(self, names: set[str]) -> None:
        """Forget records, a task before its secret, so that a crash leaves no task without one."""
        store_manifest.unsettle(self.root)
        for name in sorted(names & self._records.keys(), reverse=True):
            store_manifest.packed_path(self.root / name).unlink(missing_ok=True)
            del self._records[name]
            self._parsed.pop(name, None)

    def settle(self) -> None:
        """Write the manifest with all changes; whoever has written many records calls it at the end."""
        with self._lock:
            store_manifest.write_manifest(self.root, self._manifest)
            (self.root / store_manifest.UNSETTLED).unlink(missing_ok=True)

    def _stems(self, kind: str) -> list[str]:
        """The names of all records of a kind, sorted, without folder and suffix."""
        with self._lock:
            names = [name for name in self._records if name.startswith(f"{kind}/")]
        return sorted(name.removeprefix(f"{kind}/").removesuffix(".json") for name in names)

    # --- reading ---------------------------------------------------------------------

    def task_ids(self) -> list[str]:
        """All task ids, sorted."""
        return self._stems("tasks")

    def require_task_ids(self) -> list[str]:
        """As ``task_ids``, for whoever would call an empty store whole: NothingToDoError (CR0604)."""
        found = self.task_ids()
        if not found:
            fix = f"composer-rl tasks build SOURCE --out {shlex.quote(str(self.root))}"
            raise NothingToDoError("CR0604", "the store holds no tasks.", where=str(self.root), fix=fix)
        return found

    def tasks(self) -> list[Task]:
        """All tasks, in the order of their ids."""
        return [self.get(task_id) for task_id in self.task_ids()]

    def get(self, task_id: str) -> Task:
        """One task; where there is none of this id, the error names the nearest (CR0412)."""
        if not self.has_record(f"tasks/{task_id}.json"):
            ids = self.task_ids()
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
        return self.read_record(f"repositories/{slug}.json", self._with_baseline)

    def _with_baseline(self, value: Mapping[str, Any]) -> RepositoryRecord:
        return RepositoryRecord.from_json({**value, **json.loads(self.blob(value["baseline"]))})

    def repositories(self) -> list[RepositoryRecord]:
        """All repositories, also those that gave no task, by name."""
        return [self.repository(slug) for slug in self._stems("repositories")]

    def environment_lock(self, fingerprint: str) -> EnvironmentLock:
        return self.read_record(f"locks/{fingerprint}.json", EnvironmentLock.from_json)

    def broken_text(self, task: Task) -> str:
        """The file with the hole; ``task.hole`` counts its characters. For tasks of one hole."""
        return self.files(task, "rollout")[task.hole.path].decode()

    def golden_body(self, task: Task) -> str:
        """The deleted code, as ``Changes.golden_code``. Never to be shown to a policy."""
        record = self.record(task.task_id)
        changes = record.changes
        return changes.golden_code({path: self.original(record, path) for path in changes.source_files})

    def original(self, record: TaskRecord, path: str) -> bytes:
        """A file of a task's repository as it was. Never to be shown to a policy."""
        files = self.repository(record.repository_record).files
        if path not in files:
            where = store_manifest.packed_path(self.root / f"tasks/{record.task_id}.json")
            raise store_manifest.damaged(where, f"{path} is not in its repository")
        return self.blob(files[path])

    def twins(self, task: Task) -> dict[str, Twin]:
        """The recorded behaviour of its functions, by pin. Never to enter a sandbox of a policy's tools."""
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
            has_hidden_tests=task.has_hidden_tests,
        )

    def _own_tests(self, task: Task) -> str:
        """The source of the test functions that fail without the golden body."""
        repository = self.repository(self.record(task.task_id).repository_record)
        places = sorted({repository.places[test] for test in task.fail_to_pass if test in repository.places})
        digests = {path: repository.files[path] for path, _, _ in places if path in repository.files}
        texts = {
            path: function_texts(self.blob(digest).decode("utf-8", "replace"))
            for path, digest in digests.items()
        }
        found = (texts.get(path, {}).get((line, name)) for path, line, name in places)
        return "\n".join(text for text in found if text)

    def files(self, task: Task, view: View) -> dict[str, bytes]:
        """The files of a view of a task by path; see ``planning.edits``."""
        record = self.record(task.task_id)
        try:
            return view_files(self.repository_files(record.repository_record), record.changes, view)
        except ValueError as error:
            where = store_manifest.packed_path(self.root / f"tasks/{task.task_id}.json")
            raise store_manifest.damaged(where, f"its edits do not fit: {error}") from error

    def repository_files(self, slug: str) -> dict[str, bytes]:
        """All original files of a repository by path."""
        return {path: self.blob(digest) for path, digest in self.repository(slug).files.items()}

    def write_tree(self, task: Task, folder: Path, view: View = "rollout") -> None:
        """Write a private copy of a view into ``folder``, which is made if absent; a rollout's has a fresh ``.git``."""
        folder.mkdir(parents=True, exist_ok=True)
        files = self.files(task, view)
        write_files(folder, with_git(files) if view == "rollout" else files)

    def environment(self, task: Task) -> Environment:
        """The environment in which the task's tests run; see ``environment_of``."""
        return self.environment_of(task.environment)

    def environment_of(self, fingerprint: str) -> Environment:
        """An environment, installed from the store's own wheels if absent; who reads records meanwhile does not wait.

        InputError where it does not fit this machine (CR0413), or is damaged (CR0408, CR0411).
        """
        if fingerprint not in self._environments:
            self._environments[fingerprint] = open_environment(
                self.environment_lock(fingerprint),
                backend=self.backend,
                read_wheel=lambda wheel: self.blob(wheel.sha256),
            )
        return self._environments[fingerprint]

    def verify(self) -> None:
        """Read every record, and every file that a record names."""
        for task_id in self._stems("instructions"):
            self.read_record(f"instructions/{task_id}.json", dict)
        for digest in sorted(self._named_blobs()):
            self.blob(digest)

    # --- writing ---------------------------------------------------------------------

    def put_lock(self, lock: EnvironmentLock) -> None:
        for wheel in (*lock.wheels, lock.installer):
            self.put_blob(self.wheel(wheel), is_packed=True)
        self.put_record(f"locks/{lock.fingerprint}.json", lock.to_json())

    def put_repository(self, slug: str, record: RepositoryRecord) -> None:
        """Keep a repository; what grows with its tests goes into a blob, which is compressed."""
        value = record.to_json()
        baseline = {name: value.pop(name, None) for name in _BASELINE}
        digest = self.put_blob(json.dumps(baseline, sort_keys=True, separators=(",", ":")).encode())
        self.put_record(f"repositories/{slug}.json", {**value, "baseline": digest})

    def put_task(self, record: TaskRecord, secret: SecretRecord) -> None:
        """Keep both records of a task, new or instead of earlier ones."""
        both = {"secrets": secret.to_json(), "tasks": record.to_json()}
        self._put_records({f"{kind}/{record.task_id}.json": value for kind, value in both.items()})

    @contextmanager
    def proposed(self, record: TaskRecord, secret: SecretRecord) -> Iterator[Task]:
        """A task whose public record is read meanwhile as if it were kept; nothing is written."""
        name = f"tasks/{record.task_id}.json"
        with self._lock:
            self._parsed[name] = {TaskRecord.from_json: record}
        try:
            yield record.to_task(secret, self.repository(record.repository_record))
        finally:
            with self._lock:
                self._parsed.pop(name, None)

    def _named_blobs(self) -> set[str]:
        """The sha256 of every content that a record names; each of them is read."""
        for task_id in self._stems("tasks"):
            self.record(task_id)
        repositories = {slug: self.repository(slug).files for slug in self._stems("repositories")}
        values = (self.read_record(f"repositories/{slug}.json", dict) for slug in repositories)
        baselines = (str(value["baseline"]) for value in values)
        twins = (self.secret(task_id).twins or {} for task_id in self._stems("secrets"))
        locks = map(self.environment_lock, self._stems("locks"))
        wheels = {wheel.sha256 for lock in locks for wheel in (*lock.wheels, lock.installer)}
        return wheels.union(baselines, *(own.values() for own in (*twins, *repositories.values())))

    def drop_task(self, task_id: str) -> None:
        """Forget a task; recorded behaviour that no other task names goes with ``drop_records``."""
        with self._lock:
            self._drop({f"{kind}/{task_id}.json" for kind in ("tasks", "secrets", "instructions")})

    def drop_records(self, keep: set[str]) -> None:
        """Leave the records of ``keep``, the kept tasks' instructions, and the files that these name.

        What an earlier build or a crash left is removed. Nothing may be written meanwhile.
        """
        with self._lock:
            self._drop(
                {name for name in self._records if name.replace("instructions/", "tasks/") not in keep}
            )
            named = self._named_blobs() | self._records.keys()
            records = (path for folder in store_manifest.FOLDERS for path in (self.root / folder).glob("*"))
            for path in [path for path in (*self._objects.glob("??/*"), *records) if path.is_file()]:
                name = path.name.removesuffix(store_manifest.SUFFIX)
                if name not in named and f"{path.parent.name}/{name}" not in named:
                    path.unlink()
