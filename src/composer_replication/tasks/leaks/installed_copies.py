"""Is the golden code of a task also in a package that its environment installs, or in the standard library?

The thief of ``leak_scan`` reads everything that is shown, which takes seconds; as a gate of each
candidate this looks at Python sources alone, whose lines are read once a process.
"""

from __future__ import annotations

import os
import secrets
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

from composer_replication.records import Task
from composer_replication.sandbox import base_interpreter
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.leaks.leak_fingerprints import Fingerprint, fingerprints
from composer_replication.tasks.leaks.leak_search import MIN_RUN_CHARACTERS, Leak, Search
from composer_replication.tasks.leaks.leak_targets import line_check
from composer_replication.tasks.store import TaskStore

_read_lock = Lock()
_folder_locks: dict[tuple[str, tuple[str, ...]], Lock] = {}


def installed_copies(store: TaskStore, task: Task) -> list[Leak]:
    """The installed Python files that hold a run of the task's deleted lines, by the rule of ``leak_search``.

    Raises:
        InputError: the store is damaged (CR0411), or its environment cannot be made here (CR0408,
            CR0413, CR0414).
        SandboxFailure: the sandbox broke while the environment was made.
    """
    salt = secrets.token_hex(16)
    prints = fingerprints(store, task, salt)
    if not any(map(_is_long_enough, prints)):
        return []
    leaks: set[Leak] = set()
    for installed in _installed(store.environment(task)):
        suspects = [known for known in prints if _may_stand_in(known, installed.checks)]
        for path, checks in installed.checks_of_files if suspects else ():
            targets = [known.target for known in suspects if _may_stand_in(known, checks)]
            if targets:
                leaks |= Search(targets, salt, unmarshal=False).search_bytes(path, _read(path), in_tree=False)
    return sorted(leaks, key=lambda leak: leak.path)


@dataclass(frozen=True)
class _Installed:
    """Sorted check sums of the lines of Python files: of all together, and of each."""

    checks: array[int]
    checks_of_files: tuple[tuple[str, array[int]], ...]


def _installed(environment: Environment) -> Iterator[_Installed]:
    yield _below(str(environment.root), ())
    shown = base_interpreter()
    for folder in shown.read_only:
        yield _below(str(folder), tuple(map(str, shown.masked)))


def _below(root: str, masked: tuple[str, ...]) -> _Installed:
    """As ``_read_below``, once a process: threads that want the same folder wait for the one that reads it."""
    with _read_lock:
        lock = _folder_locks.setdefault((root, masked), Lock())
    with lock:
        return _read_below(root, masked)


@cache
def _read_below(root: str, masked: tuple[str, ...]) -> _Installed:
    """What stands below a folder, which does not change while it is in use."""
    of_files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if os.path.join(folder, name) not in masked)
        paths = [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
        of_files += [(path, _sorted(map(line_check, _lines(path)))) for path in paths]
    return _Installed(_sorted(check for _, checks in of_files for check in checks), tuple(of_files))


def _sorted(checks: Iterable[int]) -> array[int]:
    return array("L", sorted(set(checks)))


def _lines(path: str) -> list[str]:
    return _read(path).decode("utf-8", "replace").splitlines()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # what cannot be read cannot leak
        return b""


def _is_long_enough(known: Fingerprint) -> bool:
    window = known.target.window
    return any(is_distinctive for *_, is_distinctive in window) and (
        sum(characters for _, characters, _ in window) >= MIN_RUN_CHARACTERS
    )


def _may_stand_in(known: Fingerprint, checks: array[int]) -> bool:
    """Whether enough neighbouring lines, a distinctive one among them, have a line of the same check sum."""
    characters, has_distinctive = 0, False
    for (_, length, is_distinctive), check in zip(known.target.window, known.window_checks, strict=True):
        if _has(checks, check):
            characters += length
            has_distinctive |= is_distinctive
            if has_distinctive and characters >= MIN_RUN_CHARACTERS:
                return True
        else:
            characters, has_distinctive = 0, False
    return False


def _has(checks: array[int], check: int) -> bool:
    place = bisect_left(checks, check)
    return place < len(checks) and checks[place] == check
