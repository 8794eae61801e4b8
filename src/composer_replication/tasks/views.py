"""The trees that one task has, by who looks.

- rollout: broken source, visible tests; what a policy's tools may see
- visible: the same bytes, restored from the store, to grade by the visible tests
- hidden: broken source, all original tests; only ever in a grading sandbox of its own
- golden: everything as it was
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

View = Literal["rollout", "visible", "hidden", "golden"]
VIEWS: tuple[str, ...] = get_args(View)


def view_files(
    original: Mapping[str, bytes], broken: Mapping[str, bytes], without_hidden: Mapping[str, bytes], view: str
) -> dict[str, bytes]:
    """The files of one view.

    Args:
        original: all files of the repository.
        broken: the file with the hole.
        without_hidden: test files without their hidden functions.
        view: one of ``VIEWS``.

    Raises:
        ValueError: no such view.
    """
    if view not in VIEWS:
        raise ValueError(f"{view!r} is not one of {', '.join(VIEWS)}")
    if view == "golden":
        return dict(original)
    if view == "hidden":
        return {**original, **broken}
    return {**original, **without_hidden, **broken}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a tree; every file is new, so no link can lead a write astray."""
    made: set[Path] = set()
    for name, data in files.items():
        path = folder / name
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        path.write_bytes(data)
