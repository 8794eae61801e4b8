"""Where a project's modules are imported from: what its build backend is told, and what each takes by itself."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from composer_replication.tasks.intake.parsed_files import ProjectFiles, inner_table, texts, values_at
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


def declared_folders(read: ProjectFiles) -> tuple[str, ...]:
    """The folders that the project's backend takes modules from, relative to the repository's top.

    Only folders inside the repository are given, the project's own folder where that is declared.
    """
    found: list[str] = []
    for folder in _declared(read):
        path = posixpath.normpath(posixpath.join(read.folder, folder.strip() or "."))
        start = "" if path == "." else f"{path}/"
        holds_modules = any(one.startswith(start) and one.endswith(".py") for one in read.files)
        if not path.startswith(("..", "/")) and holds_modules:
            found.append("" if path == "." else path)
    return tuple(dict.fromkeys(found))


_NAMED = (
    "tool.setuptools.packages.find.where", "tool.poetry.packages.*.from", "tool.hatch.build.targets.wheel.sources",
    "tool.hatch.build.targets.wheel.dev-mode-dirs", "tool.hatch.build.sources", "tool.hatch.build.dev-mode-dirs",
    "tool.pdm.build.package-dir", "tool.pdm.package-dir", "tool.maturin.python-source",
)  # fmt: skip
"""Where ``pyproject.toml`` names places of import, by backend."""
_PACKAGES = (
    "tool.hatch.build.targets.wheel.packages", "tool.hatch.build.packages",
    "tool.scikit-build.wheel.packages", "tool.scikit-build.wheel.packages.*",
)  # fmt: skip
"""Where it names packages, each of which lies in its place of import."""
_SOURCES = ("tool.hatch.build.targets.wheel.sources", "tool.hatch.build.sources")


def _declared(read: ProjectFiles) -> Iterator[str]:
    for folders in _package_folders(read):
        yield from _of_packages(folders)
    yield from read.strings(*_NAMED)
    yield from map(str.strip, read.ini("options.packages.find", "where").replace(",", "\n").split())
    for key in ("packages", "py_modules"):
        yield from texts(inner_table(read.setup, key).get("where"))
    for package in read.strings(*_PACKAGES):
        yield posixpath.dirname(posixpath.normpath(package)) or "."
    for table in (table for path in _SOURCES for table in values_at(read.toml, path)):
        if isinstance(table, Mapping):  # a folder, and what is put in its place
            yield from _of_packages({str(new): folder for folder, new in table.items()})
    if read.backend.startswith("uv"):
        yield from texts(read.table("tool", "uv", "build-backend").get("module-root", "src"))


def _package_folders(read: ProjectFiles) -> Iterator[Mapping[Any, Any]]:
    """What setuptools is told of each package: its folder."""
    listed = read.ini("options", "package_dir").splitlines()
    yield read.table("tool", "setuptools", "package-dir")
    yield dict(line.split("=", 1) for line in listed if "=" in line)
    yield inner_table(read.setup, "package_dir")


def _of_packages(folders: Mapping[Any, Any]) -> Iterator[str]:
    """``{"": "python"}``, and ``{"pkg": "python/pkg"}`` where the folder is called like the package."""
    for package, folder in folders.items():
        if isinstance(folder, str) and isinstance(package, str):
            tail = package.strip().replace(".", "/")
            clean = posixpath.normpath(folder.strip() or ".")
            if not tail:
                yield clean
            elif clean == tail or clean.endswith(f"/{tail}"):
                yield clean.removesuffix(tail).rstrip("/") or "."


def folder_named_otherwise(read: ProjectFiles, package: str) -> str:
    """The folder that setuptools is told to install as a package of another name; empty where it is told none."""
    for folders in _package_folders(read):
        for name, folder in folders.items():
            is_it = str(name).strip() == package
            if is_it and posixpath.basename(posixpath.normpath(str(folder))) != package:
                return str(folder).strip()
    return ""
