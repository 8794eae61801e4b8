"""What a broken file says about a place in it, and the broken places of a task as a diff."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from composer_replication.records import Hole, Task
from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.syntax_trees import first_line, parsed

MAX_LINES = 150
"""Of the broken places of one task; a module may have a hundred."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_tree = lru_cache(maxsize=16)(parsed)
"""A file may have a hundred holes; nobody changes its tree."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the broken file says about a hole.

    ``line`` is the marker's line. ``header`` are the lines from the first one of the function around it
    (decorators included) to the docstring, ``docstring`` the docstring's own lines, both as they stand in the file. ``name`` is the qualified name of
    the function, empty where none was found. ``owner`` is the class around,
    ``siblings`` its other members, ``neighbours`` what else the file defines at the top.
    """

    line: int
    header: str
    docstring: str
    name: str
    owner: str
    siblings: tuple[str, ...]
    neighbours: tuple[str, ...]


def look_around(broken_text: str, hole: Hole) -> Surroundings:
    """Read the broken file around its hole; a file that does not parse tells the lines alone."""
    lines = Lines(broken_text)
    marker = broken_text[hole.start : hole.end]
    start = hole.start + len(marker) - len(marker.lstrip())
    line = sum(begin <= start for begin in lines.starts)
    module = _tree(broken_text) or ast.Module([], [])
    chain = list(_chain(module, line))
    function = next((node for node in reversed(chain) if isinstance(node, _Function)), None)
    owner = next((node for node in reversed(chain) if isinstance(node, ast.ClassDef)), None)
    first = line if function is None else first_line(function)
    head = broken_text[lines.starts[first - 1] : max(hole.start, lines.starts[first - 1])]
    cut = len(head)
    if function is not None and ast.get_docstring(function, clean=False) is not None:
        begin = lines.starts[function.body[0].lineno - 1] - lines.starts[first - 1]
        cut = begin if begin > 0 else cut  # else all on one line: it stays together
    return Surroundings(
        line=line,
        header=head[:cut].rstrip(),
        docstring=head[cut:].rstrip(),
        name="" if function is None else ".".join(getattr(node, "name", "") for node in chain),
        owner="" if owner is None else owner.name,
        siblings=() if owner is None else _names(owner.body, chain),
        neighbours=_names(module.body, chain),
    )


def _chain(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """The definitions around a line, from the outside in."""
    for child in ast.iter_child_nodes(node):
        if getattr(child, "lineno", 0) <= line <= (getattr(child, "end_lineno", None) or 0):
            if isinstance(child, _Definition):
                yield child
            yield from _chain(child, line)


def _names(body: Sequence[ast.stmt], chain: Sequence[ast.AST]) -> tuple[str, ...]:
    """What a block defines beside the nodes of the chain, each name once, in its order."""
    return tuple(
        dict.fromkeys(node.name for node in body if isinstance(node, _Definition) and node not in chain)
    )


def public_names(text: str) -> tuple[str, ...]:
    """The functions and classes that a file defines at the top, without those that begin with an underscore."""
    module = _tree(text)
    body = [] if module is None else module.body
    return tuple(name for name in _names(body, ()) if not name.startswith("_"))


def class_members(text: str, symbol: str) -> tuple[str, ...] | None:
    """The methods of the class with that qualified name; None when the file has no such class."""
    node: ast.AST | None = _tree(text)
    for name in symbol.split("."):
        classes = (one for one in getattr(node, "body", []) if isinstance(one, ast.ClassDef))
        node = next((one for one in classes if one.name == name), None)
    return _names(node.body, ()) if isinstance(node, ast.ClassDef) else None


# --- the broken places as a diff, in which what went is a count and never a line ---


def broken_regions(store: TaskStore, task: Task) -> str:
    """All broken places of a task, removed files first; of a long text the first lines."""
    record = store.record(task.task_id)
    views = {view: store.files(task, view) for view in ("golden", "rollout")}

    def lines(view: str, path: str) -> list[str]:
        return views[view][path].decode("utf-8", "replace").splitlines()

    shown: list[str] = []
    for path in record.removed_files:
        shown += [f"--- {path}", _removed(lines("golden", path), "the file, ")]
    for path in sorted({edit.path for edit in record.edits}):
        shown += _changes(path, lines("golden", path), lines("rollout", path))
    left = len(shown) - MAX_LINES
    return "\n".join([*shown[:MAX_LINES], *([f"... and {left} more lines"] if left > 0 else [])])


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
    return f"- ... {what}{num_lines} {'line' if num_lines == 1 else 'lines'} removed"


def first_broken_line(store: TaskStore, task: Task) -> int | None:
    """The line, counted from 1, of the first change in the task's own file; None when the file is gone or as it was."""
    record = store.record(task.task_id)
    files = store.repository(record.repository_record).files
    edits = [edit for edit in record.edits if edit.path == task.path]
    if not edits or task.path not in files or task.path in task.removed_files:
        return None
    edit = min(edits, key=lambda edit: edit.start)
    before = store.blob(files[task.path]).decode("utf-8", "replace")[: edit.start]
    margin = edit.text[: len(edit.text) - len(edit.text.lstrip())]
    return (before + margin).count("\n") + 1  # no edit stands above it, so nothing has moved
