"""Which tasks have passed a validation, kept in the cache so that an interrupted one need not begin again.

A journal's name is a digest of all that the outcome hangs on: the store by its fingerprint, the version of the
gates and of this package, how often, in which sandbox, under which Python. Each line is a task
that passed all of that; a line that cannot be read is a task that is tried again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from composer_replication import __version__
from composer_replication.run_folder import SCHEMA_VERSION
from composer_replication.sandbox import choose_backend
from composer_replication.tasks.intake.cache import cache_folder, sha256_of
from composer_replication.tasks.journal import GATES_VERSION
from composer_replication.tasks.store import TaskStore

FOLDER = "validations"
"""In the cache; ``cache prune`` knows it by this name."""


def journal_key(store: TaskStore, *, repeat: int) -> dict[str, Any]:
    """Everything that the outcome of a validation hangs on, but for the machine's good will.

    Raises:
        UsageError: no such backend (CR0305), or one that isolates nothing and is not accepted (CR0340).
        MissingError: no sandbox works here (CR0301).
    """
    backend = choose_backend(store.backend)
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": store.fingerprint,
        "gates_version": GATES_VERSION,
        "package_version": __version__,
        "repeat": repeat,
        "backend": f"{backend.name} {type(backend).__module__}:{type(backend).__qualname__}",
        "python": f"{sys.implementation.cache_tag} {platform.machine()}",
    }


def journal_path(key: Mapping[str, Any]) -> Path:
    """Where the passed tasks of one key stand."""
    digest = sha256_of(json.dumps(key, sort_keys=True).encode())[:32]
    return cache_folder() / FOLDER / f"{digest}.jsonl"


class PassedTasks:
    """The tasks that have passed under one key; opened by ``passed_tasks``."""

    def __init__(self, file: IO[bytes], taken_over: frozenset[str]) -> None:
        self.taken_over = taken_over
        self._file = file
        self._lock = threading.Lock()

    def add(self, task_id: str) -> None:
        """Note a task that has passed; it is on the disk when this returns."""
        with self._lock:
            self._file.write(json.dumps({"task_id": task_id}).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def passed_tasks(key: Mapping[str, Any], known: Collection[str], *, resume: bool) -> Iterator[PassedTasks]:
    """The journal of a key, held against ``cache prune`` meanwhile.

    Args:
        key: of ``journal_key``.
        known: ids of the store's tasks.
        resume: take over what stands in it; otherwise it begins anew, since each task is tried anew.

    Raises:
        OSError: the cache cannot be read or written.
    """
    path = journal_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        if not resume:
            file.truncate(0)
        file.seek(0)
        data = file.read()
        if data and not data.endswith(b"\n"):  # a crash cut the last line off
            file.write(b"\n")
        yield PassedTasks(file, frozenset(_named(data)).intersection(known))


def _named(data: bytes) -> Iterator[str]:
    """The ids in the lines of a journal."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
            yield str(json.loads(line)["task_id"])
