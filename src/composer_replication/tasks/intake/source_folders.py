"""Where a project's modules are imported from: what its build backend is told, and what each takes by itself."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from composer_replication.tasks.intake.parsed_files import ProjectFiles, texts
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
    for folder in (*_setuptools(read), *_backends(read)):
        path = posixpath.normpath(posixpath.join(read.folder, folder.strip() or "."))
        if not path.startswith(("..", "/")) and _holds_modules(path, read.files):
            found.append("" if path == "." else path)
    return tuple(dict.fromkeys(found))


def _holds_modules(folder: str, files: Collection[str]) -> bool:
    start = "" if folder == "." else f"{folder}/"
    return any(path.startswith(start) and path.endswith(".py") for path in files)


def folder_named_otherwise(read: ProjectFiles, package: str) -> str:
    """The folder that setuptools is told to install as a package of another name; empty where it is told none."""
    for folders in _package_folders(read):
        for name, folder in folders.items():
            if (
                str(name).strip() == package
                and posixpath.basename(posixpath.normpath(str(folder))) != package
            ):
                return str(folder).strip()
    return ""


def _package_folders(read: ProjectFiles) -> Iterator[Mapping[Any, Any]]:
    listed = read.ini("options", "package_dir").splitlines()
    pairs = dict(line.split("=", 1) for line in listed if "=" in line)
    for folders in (read.table("tool", "setuptools", "package-dir"), pairs, read.setup.get("package_dir")):
        if isinstance(folders, Mapping):
            yield folders


def _setuptools(read: ProjectFiles) -> Iterator[str]:
    for folders in _package_folders(read):
        yield from _of_packages(folders)
    yield from texts(read.table("tool", "setuptools", "packages", "find").get("where"))
    listed = read.ini("options.packages.find", "where").replace(",", "\n").splitlines()
    yield from filter(None, map(str.strip, listed))
    for key in ("packages", "py_modules"):
        value = read.setup.get(key)
        if isinstance(value, Mapping):
            yield from texts(value.get("where"))


def _of_packages(folders: object) -> Iterator[str]:
    """``{"": "python"}``, and ``{"pkg": "python/pkg"}`` where the folder is called like the package."""
    for package, folder in folders.items() if isinstance(folders, Mapping) else ():
        if not isinstance(folder, str) or not isinstance(package, str):
            continue
        tail = package.strip().replace(".", "/")
        clean = posixpath.normpath(folder.strip() or ".")
        if not tail:
            yield clean
        elif clean == tail or clean.endswith(f"/{tail}"):
            yield clean.removesuffix(tail).rstrip("/") or "."


def _backends(read: ProjectFiles) -> Iterator[str]:
    packages = read.table("tool", "poetry").get("packages")
    for package in packages if isinstance(packages, list) else ():
        if isinstance(package, Mapping) and isinstance(package.get("from"), str):
            yield package["from"]
    wheel = read.table("tool", "hatch", "build", "targets", "wheel")
    for table in (wheel, read.table("tool", "hatch", "build")):
        yield from _hatch(table)
    for pdm in (read.table("tool", "pdm", "build"), read.table("tool", "pdm")):
        yield from texts(pdm.get("package-dir"))
    yield from texts(read.table("tool", "maturin").get("python-source"))
    if read.backend.startswith("uv"):
        module_root = read.table("tool", "uv", "build-backend").get("module-root", "src")
        yield from texts(module_root)
    named = read.table("tool", "scikit-build", "wheel").get("packages")
    for folder in named.values() if isinstance(named, Mapping) else texts(named):
        yield posixpath.dirname(str(folder)) or "."


def _hatch(table: Mapping[str, Any]) -> Iterator[str]:
    """Packages lie in their parent; a source that is taken off, and ``dev-mode-dirs``, are places of import."""
    for package in texts(table.get("packages")):
        yield posixpath.dirname(posixpath.normpath(package)) or "."
    sources = table.get("sources")
    if isinstance(sources, Mapping):
        for folder, new in sources.items():
            yield from _of_packages({str(new): folder})
    else:
        yield from texts(sources)
    yield from texts(table.get("dev-mode-dirs"))
