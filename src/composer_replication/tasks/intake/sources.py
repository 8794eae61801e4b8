"""Open a SOURCE: a folder, an archive, ``sdist:NAME==VERSION`` or a git address; only reading and fetching.

A repository enters as a mapping of paths to bytes. None of its code is run here, and
none of its links is followed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from composer_replication.errors import InputError
from composer_replication.tasks.intake import archives, git_source, tree_rules
from composer_replication.tasks.intake.cache import sha256_of, sha256_of_file
from composer_replication.tasks.intake.environment import UnusableRepository
from composer_replication.tasks.intake.index import fetch_sdist
from composer_replication.tasks.intake.project_files import (
    PROJECT_FILES,
    Project,
    find_projects,
    import_folders,
    version_files,
)
from composer_replication.tasks.intake.tree_rules import TreeRules

NOT_FETCHED = ("CR0407", "CR0408")
"""Codes of an index that cannot be reached or lacks a package."""
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)")
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_SHORT_ID = 12
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class RepositorySource:
    """One repository as bytes.

    ``files`` are those of the task tree, ``metadata`` those that declare name, version and requirements; ``sha256``
    covers both (for an archive also what was left out). ``commit`` is the full id of the commit that a git address
    led to, else empty. ``left_out`` are files that are not in the tree although a test might miss them, the likeliest
    first. ``origin`` is ``sdist:NAME==VERSION`` or the git address without the name of a user; empty for what lies
    on this machine.
    """

    source: str
    name: str
    version: str
    sha256: str
    files: Mapping[str, bytes]
    metadata: Mapping[str, bytes]
    commit: str = ""
    left_out: tuple[str, ...] = ()
    origin: str = ""

    @property
    def repository(self) -> str:
        return f"{self.name}=={self.version}"


def open_source(source: str) -> RepositorySource:
    """Read a repository.

    Args:
        source: a folder, an archive (``.tar.gz``, ``.tgz``, ``.zip`` …), ``sdist:NAME==VERSION``, or
            ``git+https://HOST/OWNER/REPO@REF`` (also ssh, file, ``git@HOST:…``; HEAD without a REF).

    Raises:
        InputError: no such path, no SOURCE, no Python project, hostile or too large (CR0402); not in the index, or a
            repository or commit that git cannot fetch (CR0407, CR0408).
        MissingError: a git address, and no git (CR0440).
    """
    if git_source.is_git_source(source):
        address, commit, listing = git_source.list_commit(source)
        return replace(_read(source, listing, address.name, commit), origin=address.public)
    if source.startswith("sdist:"):
        pin = _PIN.fullmatch(source.removeprefix("sdist:").strip())
        if pin is None:
            problem, fix = "the source is not sdist:NAME==VERSION.", "for example sdist:toolz==1.2.0"
            raise InputError("CR0402", problem, where=source, fix=fix)
        return replace(_read_archive(source, fetch_sdist(pin[1], pin[2])), origin=f"sdist:{pin[0]}")
    path = Path(os.path.expanduser(source))  # unlike the method it leaves the home of nobody as it is
    if source.strip() and os.path.isdir(path):
        return _read(source, archives.list_folder(path), path.resolve().name)
    if os.path.isfile(path) and path.name.lower().endswith(archives.ARCHIVE_SUFFIXES):
        return _read_archive(source, path)
    problem = "the source is empty, cannot be reached, or is neither a folder nor an archive."
    kinds = f"give a folder, an archive ({', '.join(archives.ARCHIVE_SUFFIXES)}), sdist:NAME==VERSION or git+URL@REF."
    raise InputError("CR0402", problem, where=source[:_SHOWN_CHARACTERS], fix=kinds)


def _read_archive(source: str, path: Path) -> RepositorySource:
    name = path.resolve().name
    for suffix in archives.ARCHIVE_SUFFIXES:
        name = name.removesuffix(suffix)
    found = _read(source, archives.list_archive(path), name)
    return replace(found, sha256=sha256_of_file(path))


def open_sources(
    sources: Sequence[str], progress: Callable[[int, int, str], None] | None = None
) -> tuple[list[RepositorySource], dict[str, UnusableRepository]]:
    """Open all sources; one that cannot be used is told beside those that can.

    ``progress`` is called with (done, total, what) after each one. Where none can be used the first one's InputError is raised.
    """
    opened: dict[str, RepositorySource] = {}
    refused: dict[str, InputError] = {}
    for done, source in enumerate(sources, start=1):
        try:
            opened[source] = open_source(source)
        except InputError as error:
            refused[source] = error
        if progress is not None:
            progress(done, len(sources), "sources")
    if not opened:
        raise next(iter(refused.values()))
    unusable = {source: UnusableRepository(error.code, error.message) for source, error in refused.items()}
    return list(opened.values()), unusable


def needs_no_path(source: str) -> bool:
    """Whether a SOURCE is fetched, so that it is the same from every folder."""
    return source.startswith("sdist:") or git_source.is_git_source(source)


def is_pinned(source: str) -> bool:
    """Whether a SOURCE names its bytes for good: an exact version, or a full commit id."""
    return source.startswith("sdist:") or git_source.names_commit(source)


def _read(source: str, listing: archives.Listing, fallback: str, commit: str = "") -> RepositorySource:
    """The files that enter the tree of a source, and those that declare its project.

    Data that strings of its tests name is read behind the others. ``fallback`` is its name where it says none.
    """
    # Those that a record can name: no bytes that are no text, no line break.
    names = frozenset(name for name in listing.files if not _NO_TEXT.search(name))
    links = frozenset(name for name in listing.links if not _NO_TEXT.search(name))
    rules = TreeRules(names)
    in_tree = {name for name in names if rules.belongs(PurePosixPath(name))}
    about = {name for name in names if tree_rules.is_metadata_path(PurePosixPath(name))}
    found = listing.read(in_tree | about)
    named = rules.named_data(found)
    with suppress(InputError):  # too large together: then they are among what is left out
        found |= listing.read(named)
    left_out = rules.left_out(found, links)
    found = dict(sorted(found.items()))
    sha256 = sha256_of("\n".join(f"{sha256_of(data)} {name}" for name, data in found.items()).encode())
    files = {name: data for name, data in found.items() if name in in_tree | named}
    metadata = {name: data for name, data in found.items() if name in about}
    has_code = any(name.endswith(".py") for name in files)
    if not has_code or metadata.keys().isdisjoint((*PROJECT_FILES, "PKG-INFO")):
        problem = "this is no Python project: no pyproject.toml, setup.cfg or setup.py with Python sources."
        raise InputError("CR0402", problem, where=source, fix="give the folder that holds pyproject.toml.")
    projects = find_projects(found)
    files |= _written_by_builds(projects, found, fallback, commit)
    name, version = _safe(projects[0].name or fallback), projects[0].version or commit[:_SHORT_ID]
    return RepositorySource(source, name, version, sha256, files, metadata, commit, left_out)


def _written_by_builds(
    projects: Sequence[Project], files: Mapping[str, bytes], fallback: str, commit: str
) -> dict[str, bytes]:
    """What an installation would add to the tree: metadata of each project, and version files.

    Some packages ask importlib.metadata for their own version or entry points; the long description stays out.
    Many checkouts leave the version to a tool that reads the tags: then it is 0, with the commit where there is one.
    """
    made: dict[str, bytes] = {}
    for project in projects:
        made |= version_files(project, project.version or "0")
        version = project.version or (f"0+g{commit[:_SHORT_ID]}" if commit else "0")
        # The name of the folder is cut at its first hyphen by who looks it up.
        folder = f"{_safe(project.name or fallback).replace('-', '_')}-{version}.dist-info"
        points = project.entry_points
        if project.name:
            told = f"Metadata-Version: 2.1\nName: {project.name}\nVersion: {version}\n"
            made[f"{folder}/METADATA"] = told.encode()
        if project.name and points:
            told = "\n".join(
                f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points[group].items())
                for group in sorted(points)
            )
            made[f"{folder}/entry_points.txt"] = told.encode()
        roots = import_folders(projects, files) if project is projects[0] else []
        if roots and roots != tree_rules.usual_folders(files):
            made[f"{folder}/{tree_rules.FOLDERS_FILE}"] = "".join(f"{root}\n" for root in roots).encode()
    return made


def _safe(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.sub(r"[^A-Za-z0-9._-]", "-", name)).strip("-").lower() or "repository"
