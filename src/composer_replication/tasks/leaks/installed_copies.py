"""Is the golden code of a task also in a package that its environment installs, or in the standard library?

The search of ``leak_scan`` reads everything that is shown, which takes seconds; as a gate of each
candidate this looks at Python sources alone, whose lines are read once a process.
"""

from __future__ import annotations

import os
import zlib
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
from composer_replication.tasks.leaks.leak_search import EDGES, MIN_RUN_CHARACTERS, Leak, Search, Target
from composer_replication.tasks.leaks.leak_targets import targets_of
from composer_replication.tasks.store import TaskStore

_read_lock = Lock()
_folder_locks: dict[tuple[str, tuple[str, ...]], Lock] = {}


def installed_copies(store: TaskStore, task: Task) -> list[Leak]:
    """The installed Python files that hold a run of the task's deleted lines, by the rule of ``leak_search``.

    Raises:
        InputError: the store is damaged (CR0411), or its environment cannot be made here (CR0408,
            CR0413).
        SandboxFailure: the sandbox broke while the environment was made.
    """
    targets = [target for target in targets_of(store, task) if any(flag for _, flag in target.window)]
    if not targets:
        return []
    leaks: set[Leak] = set()
    for installed in _installed(store.environment(task)):
        suspects = [target for target in targets if _may_stand_in(target, installed.checks)]
        for path, checks in installed.checks_of_files if suspects else ():
            found = [target for target in suspects if _may_stand_in(target, checks)]
            if found:
                leaks |= Search(found, unmarshal=False).search_bytes(path, _read(path), in_tree=False)
    return sorted(leaks, key=lambda leak: leak.path)


def _line_check(line: str) -> int:
    """A check sum of a line that is the same with and without quotation marks, diff signs or a number before it."""
    return zlib.crc32(line.strip(EDGES).encode("utf-8", "replace"))


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
        of_files += [(path, _sorted(map(_line_check, _lines(path)))) for path in paths]
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


def _may_stand_in(target: Target, checks: array[int]) -> bool:
    """Whether enough neighbouring lines, a distinctive one among them, have a line of the same check sum."""
    characters, has_distinctive = 0, False
    for line, is_distinctive in target.window:
        if _has(checks, _line_check(line)):
            characters += len(line)
            has_distinctive |= is_distinctive
            if has_distinctive and characters >= MIN_RUN_CHARACTERS:
                return True
        else:
            characters, has_distinctive = 0, False
    return False


def _has(checks: array[int], check: int) -> bool:
    place = bisect_left(checks, check)
    return place < len(checks) and checks[place] == check
