"""In which files does a task delete code? A line of a README or of an ``__init__.py`` is none."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.planning.edits import edited_text
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import damaged
from composer_replication.tasks.store_records import TaskRecord
from composer_replication.tasks.syntax_trees import parse_syntax

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def files_of_deleted_code(store: TaskStore, record: TaskRecord) -> tuple[str, ...]:
    """The Python files, tests aside, in which a task deletes function bodies or whole definitions, sorted.

    With ``removal`` body every edit is the body of one function. With whole a file counts when a function,
    a class or a method (nested ones too) that the original defines is not defined in the broken file, or
    when the file is gone and defined one. Imports, re-exports, ``__all__`` entries, constants, and lines of
    other texts do not count, nor does a file that cannot be parsed before or after.

    Args:
        store: the store that holds the task's repository.
        record: of the task.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    touched = {*(edit.path for edit in record.edits), *record.removed_files}
    sources = sorted(
        path for path in touched if PurePosixPath(path).suffix == ".py" and not is_test_path(path)
    )
    if record.removal == "body":
        return tuple(sources)
    return tuple(path for path in sources if _loses_definition(store, record, path))


def num_features_in_two_files(store: TaskStore) -> int:
    """How many tasks of size ``feature`` delete code in two Python files or more; see ``files_of_deleted_code``.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    records = (store.record(task_id) for task_id in store.task_ids())
    return sum(
        len(files_of_deleted_code(store, record)) >= 2
        for record in records
        if record.granularity == "feature"
    )


def _loses_definition(store: TaskStore, record: TaskRecord, path: str) -> bool:
    original = store.original(record, path)
    if path in record.removed_files:
        return bool(_definitions(original))
    try:
        broken = edited_text(original.decode(), [edit for edit in record.edits if edit.path == path])
    except ValueError as error:
        raise damaged(store.root / "tasks" / record.task_id, f"its edits do not fit: {error}") from error
    before, after = _definitions(original), _definitions(broken.encode())
    return before is not None and after is not None and bool(before - after)


def _definitions(source: bytes) -> Counter[str] | None:
    """How often each qualified name is defined, whichever branch it stands in; None when it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # an odd escape in somebody's string
            return Counter(_qualified_names(parse_syntax(source), ""))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _qualified_names(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            name = f"{prefix}{child.name}"
            yield name
            yield from _qualified_names(child, f"{name}.")
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _qualified_names(child, prefix)
