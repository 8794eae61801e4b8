"""Repositories that cannot be used: which, and why (a second copy of its modules, compiled parts)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath

from packaging.utils import canonicalize_name

from composer_replication.errors import InputError
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.intake.lock import UnusableRepository
from composer_replication.tasks.intake.parsed_files import ProjectFiles
from composer_replication.tasks.intake.project_files import find_projects
from composer_replication.tasks.intake.requirements import read_requirements
from composer_replication.tasks.intake.setup_py import setup_keywords
from composer_replication.tasks.intake.source_folders import (
    below_root,
    folder_named_otherwise,
    own_modules,
    recorded_folders,
)
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.intake.tree_rules import is_subject_path

_COMPILING_KEYWORDS = ("ext_modules", "cffi_modules", "rust_extensions", "ext_package")
NOT_FETCHED = ("CR0407", "CR0408")
"""Codes of an index that cannot be reached or lacks a package."""
_NUM_NAMED = 3
_COMPILING_BACKENDS = ("maturin", "scikit_build_core", "mesonpy", "setuptools_rust")


def refuse_second_copy(source: RepositorySource, environment: Environment) -> None:
    """No module of the tree may also be installed: tests would import the old code.

    Two portions of one namespace package (no ``__init__.py`` in either) may lie side by side,
    as long as no module has the same name in both.
    """
    roots = recorded_folders(source.files)
    own = {below_root(path, roots) for path in source.files if is_subject_path(path)}
    for folder in environment.root.glob("lib/python*/site-packages"):
        clash = next(filter(None, (_clash(path, own, folder) for path in sorted(own))), "")
        if clash:
            raise UnusableRepository("runner-dependency", f"the environment holds a module {clash}, too")


def _clash(path: str, own: Collection[str], installed: Path) -> str:
    """The module that is installed, too, on the way to one of ours; empty where both are portions of a namespace."""
    parts = PurePosixPath(path).with_suffix("").parts
    for depth, name in enumerate(parts, start=1):
        is_there = (installed / name).is_dir() or any(installed.glob(f"{name}.*"))
        if not is_there or name == "__init__":
            return ""
        is_package = "/".join([*parts[:depth], "__init__.py"]) in own
        installed /= name
        if (
            depth == len(parts)
            or is_package
            or not installed.is_dir()
            or (installed / "__init__.py").exists()
        ):
            return ".".join(parts[:depth])
    return ""


def compiled_parts(source: RepositorySource) -> str:
    """The file that asks for compiled modules, which nobody builds here; empty when none does.

    Many packages have them for speed alone and do without, so this explains a failure and is none.
    """
    read = ProjectFiles(source.metadata)
    is_asked = read.backend.partition(".")[0] in _COMPILING_BACKENDS
    if is_asked or read.table("tool", "setuptools").get("ext-modules"):
        return "pyproject.toml"
    keywords = setup_keywords(source.metadata.get("setup.py", b""))
    return "setup.py" if not keywords.isdisjoint(_COMPILING_KEYWORDS) else ""


def explain(
    error: UnusableRepository, source: RepositorySource, installed: Collection[str] = ()
) -> UnusableRepository:
    """The same refusal with its first cause named, where the files show it.

    A red baseline is often the third consequence: of a requirement that nothing declares or that has no wheel
    (``missing-requirement``), of compiled modules (``needs-compiling``), of a module that only a build writes
    (``generated-file``); else files that were left out.

    Args:
        error: the refusal.
        source: the repository.
        installed: canonical names of what its environment holds.
    """
    if error.reason != "red-baseline":
        return error
    likeliest = sorted(source.left_out, key=lambda path: path.rpartition("/")[2] not in error.detail)
    more = f" and {len(likeliest) - _NUM_NAMED} more" if len(likeliest) > _NUM_NAMED else ""
    missed = f"; left out: {', '.join(likeliest[:_NUM_NAMED])}{more}" if likeliest else ""
    detail = f"{error.detail}{missed}"
    missing = _missing_module(error.detail, source.files)
    top = missing.partition(".")[0]
    is_own = top in own_modules(source.files)
    if missing and not is_own and top not in sys.stdlib_module_names:
        if bound := read_requirements(source, {top}).refused:
            return UnusableRepository("dependency-by-url", f"{bound[0]} is asked for by address; {detail}")
        why = _why_missing(top, source, installed)
        return UnusableRepository("missing-requirement", f"{why}; {detail}")
    file = compiled_parts(source)
    if file:
        cause = f"its {file} asks for compiled modules, which are not built"
        return UnusableRepository("needs-compiling", f"{cause}; {detail}")
    if missing and is_own and not _is_module(missing, source.files):
        cause = f"the repository has no file for its own module {missing}, which a build may write"
        return UnusableRepository("generated-file", f"{cause}; {detail}")
    return UnusableRepository(error.reason, detail)


_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_NAME = re.compile(r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'")


def _missing_module(detail: str, files: Mapping[str, bytes]) -> str:
    """The module that the first reason of a red baseline misses; empty where it says something else."""
    no_module, no_name = _NO_MODULE.search(detail), _NO_NAME.search(detail)
    if no_module or no_name is None:
        return no_module[1] if no_module else ""
    package = f"/{no_name[2].replace('.', '/')}/__init__.py"
    inits = [data for path, data in files.items() if f"/{path}".endswith(package)]
    defined = re.compile(rf"^\s*(def|class)?\s*{no_name[1]}\b".encode(), re.MULTILINE)
    return f"{no_name[2]}.{no_name[1]}" if inits and not any(map(defined.search, inits)) else ""


def _is_module(name: str, files: Collection[str]) -> bool:
    """Whether a file defines a module, or the one above it, which may define it as a name."""
    path = name.replace(".", "/")
    return any(f"/{file}".endswith((f"/{path}.py", f"/{path}/__init__.py")) for file in files)


def _why_missing(module: str, source: RepositorySource, installed: Collection[str]) -> str:
    found = read_requirements(source)
    if otherwise := folder_named_otherwise(ProjectFiles(source.metadata), module):
        return f"the package {module} lies in a folder of another name, {otherwise}, which cannot be imported from the tree"
    named = canonicalize_name(module)
    if named in found.wanted and named not in installed:
        return f"what its tests want, {named}, is not to be had as a wheel for this Python"
    unread = next(
        (one.unread for one in find_projects({**source.metadata, **source.files}) if one.unread), ""
    )
    computed = f" ({unread} computes what it needs)" if unread else ""
    return f"nothing that is declared brings the module {module}{computed}"


def open_sources(
    sources: Sequence[str], jobs: int, progress: Callable[[int, int, str], None] | None = None
) -> tuple[list[RepositorySource], dict[str, UnusableRepository]]:
    """Open all sources; one that cannot be used is told beside those that can.

    Args:
        sources: folders, archives, ``sdist:NAME==VERSION``, addresses for git.
        jobs: how many are fetched at a time.
        progress: called with (done, total, what) from the calling thread after each one.

    Raises:
        InputError: none can be used; the first one's (CR0402 to CR0408).
    """
    opened: list[RepositorySource] = []
    refused: dict[str, InputError] = {}
    with ThreadPoolExecutor(jobs, thread_name_prefix="tasks-fetch") as fetchers:
        futures = {source: fetchers.submit(open_source, source) for source in sources}
        for done, _ in enumerate(as_completed(futures.values()), start=1):
            if progress is not None:
                progress(done, len(futures), "sources")
        for source, future in futures.items():
            try:
                opened.append(future.result())
            except InputError as error:
                refused[source] = error
    if not opened:
        raise next(iter(refused.values()))
    return opened, {source: as_unusable(error) for source, error in refused.items()}


def as_unusable(error: InputError) -> UnusableRepository:
    """The error of one repository among several, which then only counts."""
    return UnusableRepository(error.code, error.message)
