"""The trees that one task has, by who looks.

- rollout: broken source, the visible tests that are shown; what a policy's tools may see
- visible: the same with the paid tests that are not shown, to grade by all visible tests
- hidden: broken source, all tests; only ever in a grading sandbox of its own
- golden: everything as it was
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from composer_replication.records import Edit
from composer_replication.tasks.planning.edits import edited_files

View = Literal["rollout", "visible", "hidden", "golden"]
VIEWS: tuple[str, ...] = get_args(View)


@dataclass(frozen=True, slots=True)
class Changes:
    """How the trees of a task differ from the original; see ``TaskRecord``."""

    edits: tuple[Edit, ...]
    removed_files: tuple[str, ...] = ()
    test_edits: tuple[Edit, ...] = ()
    visible_edits: tuple[Edit, ...] = ()
    shown_edits: tuple[Edit, ...] | None = None

    def edits_of_tests(self, view: str) -> tuple[Edit, ...]:
        """How the test files of a view differ from the original; ``golden`` is no such view."""
        if view == "rollout" and self.shown_edits is not None:
            return self.shown_edits
        return self.test_edits if view == "hidden" else self.visible_edits

    @property
    def source_files(self) -> tuple[str, ...]:
        """Every file that is not as it was, tests aside."""
        return tuple(sorted({*(edit.path for edit in self.edits), *self.removed_files}))


def view_files(original: Mapping[str, bytes], changes: Changes, view: str) -> dict[str, bytes]:
    """The files of one of ``VIEWS``, of all files of the repository; a ValueError where the edits do not fit them."""
    if view not in VIEWS:
        raise ValueError(f"{view!r} is not one of {', '.join(VIEWS)}")
    if view == "golden":
        return dict(original)
    tests = changes.edits_of_tests(view)
    files = {**original, **edited_files(original, (*tests, *changes.edits))}
    missing = sorted(set(changes.removed_files) - set(files))
    if missing:
        raise ValueError(f"{missing[0]} is removed, but it is not in the tree")
    return {path: data for path, data in files.items() if path not in changes.removed_files}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a tree; every file is new, so no link can lead a write astray."""
    made: set[str] = set()
    for name, data in files.items():  # plain calls: a build writes hundreds of thousands of small files
        path = f"{folder}/{name}"
        parent = os.path.dirname(path)
        if parent not in made:
            os.makedirs(parent, exist_ok=True)
            made.add(parent)
        with open(path, "xb") as handle:
            handle.write(data)
