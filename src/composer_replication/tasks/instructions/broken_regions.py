"""The broken places of a task as a diff, in which what went is a count and never a line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from itertools import groupby

from composer_replication.records import Task
from composer_replication.tasks.store import TaskStore

MAX_LINES = 150
"""Shown of one task; a module may have a hundred places."""


def broken_regions(store: TaskStore, task: Task) -> str:
    """All broken places of a task, removed files first; of a long text the first lines.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    record = store.record(task.task_id)
    tree, golden = store.files(task, "rollout"), store.files(task, "golden")
    shown: list[str] = []
    for path in record.removed_files:
        shown += [f"--- {path}", _removed(_lines(golden[path]), "the file")]
    for path in sorted({edit.path for edit in record.edits}):
        shown += _changes(path, _lines(golden[path]), _lines(tree[path]))
    left = len(shown) - MAX_LINES
    return "\n".join([*shown[:MAX_LINES], *([f"... and {left} more lines"] if left > 0 else [])])


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").splitlines()


def _changes(path: str, golden: list[str], broken: list[str]) -> Iterator[str]:
    """The hunks of a file, each under its path and first line; a line that stays is in both texts and no secret."""
    lines = list(difflib.unified_diff(golden, broken, lineterm=""))[2:]
    for sign, group in groupby(lines, key=lambda line: line[0]):
        if sign == "-":
            yield _removed([line[1:] for line in group])
        elif sign == "@":
            start = next(group).partition("+")[2].partition(" ")[0]
            yield f"--- {path}, line {start.partition(',')[0]}"
        else:
            yield from (line.rstrip() for line in group)


def _removed(lines: list[str], what: str = "") -> str:
    num_lines = sum(bool(line.strip()) for line in lines)
    return f"- ... {what}{', ' if what else ''}{num_lines} {'line' if num_lines == 1 else 'lines'} removed"


def first_line(store: TaskStore, task: Task) -> int | None:
    """The line, counted from 1, of the first change in the task's own file; None when the file is gone or as it was.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    record = store.record(task.task_id)
    files = store.repository(record.repository_record).files
    edits = [edit for edit in record.edits if edit.path == task.path]
    if not edits or task.path not in files or task.path in task.removed_files:
        return None
    edit = min(edits, key=lambda edit: edit.start)
    before = store.blob(files[task.path]).decode("utf-8", "replace")[: edit.start]
    margin = edit.text[: len(edit.text) - len(edit.text.lstrip())]
    return (before + margin).count("\n") + 1  # no edit stands above it, so nothing has moved
