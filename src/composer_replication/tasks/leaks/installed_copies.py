"""Is the golden code of a task also in a package that its environment installs, or in the standard library?

The search of ``leak_scan`` reads everything that is shown, which takes seconds; as a gate of each
candidate this looks at Python sources alone, whose lines are read once a process.
"""

from __future__ import annotations

import os
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
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


def installed_copies(store: TaskStore, task: Task) -> list[Leak]:
    """The installed Python files that hold a run of the task's deleted lines, by the rule of ``leak_search``.

    Raises:
        InputError: the store is damaged (CR0411), or its environment cannot be made here (CR0408,
            CR0413).
        SandboxFailure: the sandbox broke while the environment was made.
    """
    targets = [target for target in targets_of(store, task) if any(flag for _, flag in target.window)]
    leaks: set[Leak] = set()
    for path, checks in _installed(store.environment(task)) if targets else ():
        suspects = [target for target in targets if _may_stand_in(target, checks)]
        if suspects:
            leaks |= Search(suspects, unmarshal=False).search_bytes(path, _read(path), in_tree=False)
    return sorted(leaks, key=lambda leak: leak.path)


def _installed(environment: Environment) -> Iterator[tuple[str, array[int]]]:
    shown = base_interpreter()
    with _read_lock:  # threads that want the same folder wait for the one that reads it
        folders = [_below(str(environment.root), ())]
        folders += [_below(str(folder), tuple(map(str, shown.masked))) for folder in shown.read_only]
    for folder in folders:
        yield from folder


@cache
def _below(root: str, masked: tuple[str, ...]) -> list[tuple[str, array[int]]]:
    """The sorted check sums of the lines of each Python file below a folder, which does not change while it is in use."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if os.path.join(folder, name) not in masked)
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                lines = _read(path).decode("utf-8", "replace").splitlines()
                found.append((path, array("L", sorted(set(map(_line_check, lines))))))
    return found


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # what cannot be read cannot leak
        return b""


def _line_check(line: str) -> int:
    """A check sum of a line that is the same with and without quotation marks, diff signs or a number before it."""
    return zlib.crc32(line.strip(EDGES).encode("utf-8", "replace"))


def _may_stand_in(target: Target, checks: array[int]) -> bool:
    """Whether enough neighbouring lines, a distinctive one among them, have a line of the same check sum."""
    characters, has_distinctive = 0, False
    for line, is_distinctive in target.window:
        check = _line_check(line)
        place = bisect_left(checks, check)
        if place < len(checks) and checks[place] == check:
            characters += len(line)
            has_distinctive |= is_distinctive
            if has_distinctive and characters >= MIN_RUN_CHARACTERS:
                return True
        else:
            characters, has_distinctive = 0, False
    return False
