"""Where a project's modules are imported from: what its build backend is told, and what each takes by itself."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from composer_replication.tasks.intake.parsed_files import ProjectFiles, texts

USUAL_FOLDERS = ("src", "lib")
"""Places of import by custom, where they are no packages themselves."""


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


def _setuptools(read: ProjectFiles) -> Iterator[str]:
    table = read.table("tool", "setuptools")
    listed = read.ini("options", "package_dir").splitlines()
    pairs = dict(line.split("=", 1) for line in listed if "=" in line)
    for folders in (table.get("package-dir"), pairs, read.setup.get("package_dir")):
        yield from _of_packages(folders)
    packages = table.get("packages")
    find = packages.get("find") if isinstance(packages, Mapping) else None
    where = find.get("where") if isinstance(find, Mapping) else None
    yield from texts(where)
    for section in ("options.packages.find",):
        yield from filter(None, map(str.strip, read.ini(section, "where").replace(",", "\n").splitlines()))
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
