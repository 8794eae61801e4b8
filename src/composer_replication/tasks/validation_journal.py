"""Which tasks have passed a validation, kept in the cache so that an interrupted one need not begin again.

The first line of a journal says of what it speaks: the store by its fingerprint, the version of the gates and of
this package, how often and how thoroughly, in which sandbox, under which Python. Each further line is a task that
passed all of that, with a check sum over both. What does not fit is refused as a whole, never believed in part.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shlex
import stat
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.errors import InputError
from composer_replication.run_folder import SCHEMA_VERSION
from composer_replication.sandbox import choose_backend
from composer_replication.tasks.intake.cache import cache_folder, sha256_of
from composer_replication.tasks.journal import GATES_VERSION
from composer_replication.tasks.store import TaskStore

FOLDER = "validations"
"""In the cache; ``cache prune`` knows it by this name."""
_MAX_BYTES = 256 * 1024**2


def journal_key(store: TaskStore, *, repeat: int, thorough: bool) -> dict[str, Any]:
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
        "thorough": thorough,
        "backend": f"{backend.name} {type(backend).__module__}:{type(backend).__qualname__}",
        "python": f"{sys.implementation.cache_tag} {platform.machine()}",
    }


def journal_path(key: Mapping[str, Any]) -> Path:
    """Where the passed tasks of one key stand."""
    return cache_folder() / FOLDER / f"{_digest(key)}.jsonl"


class PassedTasks:
    """The tasks that have passed under one key; opened by ``passed_tasks``."""

    def __init__(self, descriptor: int, key: Mapping[str, Any], taken_over: frozenset[str]) -> None:
        self.taken_over = taken_over
        self._descriptor = descriptor
        self._digest = _digest(key)
        self._lock = threading.Lock()

    def add(self, task_id: str) -> None:
        """Note a task that has passed; it is on the disk when this returns."""
        row = {"task_id": task_id, "sum": _check_sum(self._digest, task_id)}
        with self._lock:
            _append(self._descriptor, row)


@contextmanager
def passed_tasks(key: Mapping[str, Any], known: Collection[str], *, resume: bool) -> Iterator[PassedTasks]:
    """The journal of a key, held against ``cache prune`` meanwhile.

    Args:
        key: of ``journal_key``.
        known: ids of the store's tasks.
        resume: take over what stands in it; otherwise it begins anew, since each task is tried anew.

    Raises:
        InputError: what lies there is no journal of ours, or, with ``resume``, it is damaged or speaks of something
            else (CR0900). A last line that a crash cut off is left out.
        OSError: the cache cannot be written.
    """
    path = journal_path(key)
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        data = _read_all(descriptor, path) if resume else b""
        # A crash can leave half a line, to which nothing may be appended.
        whole = data[: data.rfind(b"\n") + 1]
        taken = _taken_over(whole, key, known, path)
        os.ftruncate(descriptor, len(whole))
        if not whole:
            _append(descriptor, key)
        yield PassedTasks(descriptor, key, taken)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise
        raise _not_believed(path, "it is no regular file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_believed(path, "it is no regular file")
    return descriptor


def _read_all(descriptor: int, path: Path) -> bytes:
    """The whole file.

    Raises:
        InputError: nobody of ours has written it (CR0900).
    """
    info = os.fstat(descriptor)
    if info.st_uid != os.geteuid():
        raise _not_believed(path, "another user has written it")
    if info.st_size > _MAX_BYTES:
        raise _not_believed(path, f"it has {info.st_size} bytes")
    with open(descriptor, "rb", closefd=False) as handle:
        return handle.read()


def _taken_over(data: bytes, key: Mapping[str, Any], known: Collection[str], path: Path) -> frozenset[str]:
    """The ids in the whole lines of a journal.

    Raises:
        InputError: one of them is not what was written for this key and this store (CR0900).
    """
    rows = _rows(data, path)
    if rows and rows[0] != key:
        raise _not_believed(path, "its first line speaks of another store or another validation")
    ids, digest = set(known), _digest(key)
    taken = set()
    for number, row in enumerate(rows[1:], start=2):
        task_id = row.get("task_id") if isinstance(row, dict) else None
        if not isinstance(task_id, str) or row != {"task_id": task_id, "sum": _check_sum(digest, task_id)}:
            raise _not_believed(path, f"line {number} is not as it was written")
        if task_id not in ids:
            raise _not_believed(path, f"line {number} names a task that the store has not")
        taken.add(task_id)
    return frozenset(taken)


def _rows(data: bytes, path: Path) -> Sequence[Any]:
    rows = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise _not_believed(path, f"line {number} is not JSON") from error
    return rows


def _append(descriptor: int, row: Mapping[str, Any]) -> None:
    """One line in one write, so that two validations of the same store do not mix theirs."""
    data = (json.dumps(row, sort_keys=True) + "\n").encode()
    if os.write(descriptor, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _digest(key: Mapping[str, Any]) -> str:
    return sha256_of(json.dumps(key, sort_keys=True).encode())[:32]


def _check_sum(digest: str, task_id: str) -> str:
    return sha256_of(f"{digest} {task_id}".encode())[:16]


def _not_believed(path: Path, why: str) -> InputError:
    return InputError(
        "CR0900",
        f"the journal of tasks that have passed is not believed: {why}.",
        where=str(path),
        fix=f"rm -r {shlex.quote(str(path))}; every task is then tried again.",
    )
