"""Where the modules of a task tree are imported from, as its tree records it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

from composer_replication.tasks.intake.tree_rules import is_test_path

USUAL_FOLDERS = ("lib", "src")
"""Places of import by custom, where they are no packages themselves."""
FOLDERS_FILE = "source_folders.txt"
"""Beside the metadata that we write into a task tree: the places of import, where they are not the usual ones.

An attempt cannot change it, as no file in a ``dist-info`` is taken from one; ``pyproject.toml`` it can.
"""


def usual_folders(files: Collection[str]) -> list[str]:
    """The places of import by custom, the top last as ``.``."""
    return [*(folder for folder in USUAL_FOLDERS if is_place(folder, files)), "."]


def is_place(folder: str, files: Collection[str]) -> bool:
    """Whether modules may be imported from a folder: it is there and is no package itself."""
    return f"{folder}/__init__.py" not in files and any(path.startswith(f"{folder}/") for path in files)


def folders_file(paths: Iterable[str]) -> str:
    """The path of the file that names the places of import of a task tree; empty where it has none."""
    tails = ((path, path.partition("/")) for path in paths)
    found = (path for path, (top, _, name) in tails if name == FOLDERS_FILE and top.endswith(".dist-info"))
    return next(found, "")


def recorded_folders(files: Mapping[str, bytes]) -> list[str]:
    """The places of import of a task tree, the top last as ``.``."""
    path = folders_file(files)
    return files[path].decode().splitlines() if path else usual_folders(files)


def folders_of_tree(tree: Path) -> list[str]:
    """The places of import of a task tree on disk, the top last as ``.``."""
    for path in sorted(tree.glob(f"*.dist-info/{FOLDERS_FILE}")):
        return path.read_text(encoding="utf-8").splitlines()
    there = [
        one for one in USUAL_FOLDERS if (tree / one).is_dir() and not (tree / one / "__init__.py").exists()
    ]
    return [*there, "."]


def own_modules(files: Mapping[str, bytes]) -> frozenset[str]:
    """The first names by which an import finds something in the tree: at its places of import, or beside a test."""
    roots = recorded_folders(files)
    found: set[str] = set()
    for path in files:
        if path.endswith(".py"):
            parts = PurePosixPath(path).parts
            found.add(below_root(path, roots).partition("/")[0].removesuffix(".py"))
            if is_test_path(path):
                found.add(parts[-2] if parts[-1] == "__init__.py" else parts[-1].removesuffix(".py"))
    return frozenset(found)


def below_root(path: str, roots: Iterable[str]) -> str:
    """A path as it is imported: without the longest place of import that it lies below."""
    for root in sorted(roots, key=len, reverse=True):
        if path.startswith(f"{root}/"):
            return path.removeprefix(f"{root}/")
    return path
