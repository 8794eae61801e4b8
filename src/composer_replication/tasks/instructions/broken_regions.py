"""The broken places of a task like a diff, in which what went is a count and never a line."""

from __future__ import annotations

from collections.abc import Iterator

from composer_replication.records import Hole, Task
from composer_replication.tasks.instructions.surroundings import look_around
from composer_replication.tasks.planning.lines import Lines
from composer_replication.tasks.store import TaskStore

MAX_REGIONS = 12
"""Places shown of one task; a module may have a hundred."""


def broken_regions(store: TaskStore, task: Task, *, context_lines: int = 3) -> str:
    """All broken places of a task, removed files first; of very many the first ones.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    record = store.record(task.task_id)
    tree, golden = store.files(task, "rollout"), store.files(task, "golden")
    texts = {
        path: golden.get(path, b"").decode("utf-8", "replace")
        for path in sorted({*(edit.path for edit in record.edits), *record.removed_files})
    }
    regions = [
        f"--- {path}\n{_removed(_num_lines(texts[path]), 'the file')}" for path in record.removed_files
    ]
    edits = sorted(record.edits, key=lambda edit: (edit.path, edit.start, edit.end))
    for hole, edit in zip(task.holes, edits, strict=True):
        broken, span = tree[hole.path].decode("utf-8", "replace"), texts[edit.path][edit.start : edit.end]
        if task.removal == "body":
            regions.append(broken_region(broken, hole, _num_lines(span), context_lines=context_lines))
        else:
            regions.append(_edited_region(broken, hole, span, context_lines))
    left = len(regions) - MAX_REGIONS
    return "\n".join([*regions[:MAX_REGIONS], *([f"... and {left} more places"] if left > 0 else [])])


def broken_region(broken_text: str, hole: Hole, num_body_lines: int, *, context_lines: int = 3) -> str:
    """The broken place like a diff: what stands there with line numbers, what went as a count.

    The removed lines themselves are never in it: ``-`` says how many they were.

    Args:
        broken_text: the file with the hole.
        hole: where the body was.
        num_body_lines: how many lines it had.
        context_lines: lines before the function and after the hole.
    """
    surroundings = look_around(broken_text, hole)
    first = surroundings.first_line - context_lines
    last = surroundings.line + context_lines
    marked = range(surroundings.line, surroundings.line + 1)
    return "\n".join(
        [f"--- {hole.path}", *_shown(broken_text, first, last, marked, _removed(num_body_lines))]
    )


def _edited_region(broken_text: str, hole: Hole, span: str, context_lines: int) -> str:
    """A place where code is gone altogether; ``+`` is what stands there now."""
    starts = Lines(broken_text).starts
    first = sum(begin <= hole.start for begin in starts)
    last = sum(begin <= hole.end for begin in starts)
    if starts[last - 1] == hole.end:  # it ends where a line begins: that line is as it was
        last -= 1
    is_part = "\n" not in span and last >= first
    removed = "      - ... a part of the line removed" if is_part else _removed(_num_lines(span))
    marked = range(first, last + 1)
    shown = _shown(broken_text, first - context_lines, max(first - 1, last) + context_lines, marked, removed)
    return "\n".join([f"--- {hole.path}", *shown])


def _shown(text: str, first: int, last: int, marked: range, removed: str) -> Iterator[str]:
    """Numbered lines; ``removed`` stands before the marked ones, which bear a plus."""
    lines = Lines(text)
    num_lines = len(lines.starts) - (not lines.line(len(lines.starts)))  # none after the last line's end
    for number in range(max(1, first), min(num_lines, last) + 1):
        if number == marked.start:
            yield removed
        sign = "+" if number in marked else " "
        yield f"{number:>5} {sign} {lines.line(number)}".rstrip()
    if marked.start > min(num_lines, last):
        yield removed


def _removed(num_lines: int, what: str = "") -> str:
    noun = "line" if num_lines == 1 else "lines"
    return f"      - ... {what}{', ' if what else ''}{num_lines} {noun} removed"


def _num_lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


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
