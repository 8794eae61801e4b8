"""Open a SOURCE: a folder, an archive, ``sdist:NAME==VERSION`` or a git address; only reading and fetching.

A repository enters as a mapping of paths to bytes. None of its code is run here, and
none of its links is followed.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from composer_replication.errors import InputError
from composer_replication.tasks.intake.archives import (
    ARCHIVE_SUFFIXES,
    Listing,
    holds_code,
    is_archive,
    list_archive,
    list_folder,
)
from composer_replication.tasks.intake.cache import sha256_of, sha256_of_file
from composer_replication.tasks.intake.environment import UnusableRepository
from composer_replication.tasks.intake.git_source import (
    fetch_commit,
    is_git_source,
    list_commit,
    names_commit,
    public_address,
)
from composer_replication.tasks.intake.index import fetch_sdist
from composer_replication.tasks.intake.parsed_files import ProjectFiles, inner_table, values_at
from composer_replication.tasks.intake.project_files import Project, find_projects, import_folders
from composer_replication.tasks.intake.tree_rules import (
    FOLDERS_FILE,
    TreeRules,
    is_metadata_path,
    is_system_file,
    is_test_path,
    skips_folder,
    usual_folders,
    without_unused,
)
from composer_replication.tasks.syntax_trees import parsed

NOT_FETCHED = ("CR0407", "CR0408")
"""Codes of an index that cannot be reached or lacks a package."""
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)")
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}")
_SHORT_ID = 12
_SHOWN_CHARACTERS = 200
_PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py", "PKG-INFO")


@dataclass(frozen=True, slots=True)
class RepositorySource:
    """One repository as bytes.

    ``files`` are those of the task tree, ``metadata`` those that declare name, version
    and requirements; ``sha256`` covers both (for an archive also what was left out).
    ``commit`` is the full id of the commit that a git address led to, else empty. ``left_out`` are
    files that are not in the tree although a test might miss them, the likeliest first. ``origin``
    is ``sdist:NAME==VERSION`` or the git address that it was fetched from, without the name of a user;
    empty for what lies on this machine, whose paths are nobody else's.
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
        InputError: no such path or not a SOURCE (CR0402), not a Python project (CR0402), no
            tests (CR0419), a hostile archive (CR0402), not in the index (CR0407, CR0408),
            a repository that git cannot reach, without that commit, or too large (CR0407, CR0402).
        MissingError: a git address, and no git (CR0440).
    """
    if is_git_source(source):
        fetched = fetch_commit(source)
        found = _read(source, list_commit(fetched, skip=skips_folder), fetched.address.name, fetched.commit)
        return replace(found, origin=public_address(fetched.address))
    if not source.strip():
        raise _not_a_source(source, "the source is empty.")
    path, origin = _fetch_sdist(source) if source.startswith("sdist:") else (_path_of(source), "")
    if path.is_dir():
        return _read(source, list_folder(path, skip=skips_folder), path.resolve().name)
    if path.is_file() and is_archive(path):
        name = path.resolve().name
        for suffix in ARCHIVE_SUFFIXES:
            name = name.removesuffix(suffix)
        found = _read(source, list_archive(path, skip=is_system_file), name)
        return replace(found, sha256=sha256_of_file(path), origin=origin)
    problem = "is not a folder or an archive that can be read" if path.exists() else "does not exist"
    raise _not_a_source(source, f"the source {problem}.")


def open_sources(
    sources: Sequence[str], jobs: int, progress: Callable[[int, int, str], None] | None = None
) -> tuple[list[RepositorySource], dict[str, UnusableRepository]]:
    """Open all sources, ``jobs`` at a time; one that cannot be used is told beside those that can.

    ``progress`` is called with (done, total, what) from the calling thread after each one.

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


def _path_of(source: str) -> Path:
    """A SOURCE as a path, if it can be one."""
    try:
        path = Path(source).expanduser()
        path.is_dir()
    except PermissionError:
        raise  # its own sentence says so
    except (OSError, RuntimeError) as error:
        shown = source if len(source) <= _SHOWN_CHARACTERS else f"{source[:_SHOWN_CHARACTERS]}…"
        why = getattr(error, "strerror", None) or "it names the home of nobody"
        raise _not_a_source(shown, f"the source cannot be a path: {why}.") from error
    return path


def _not_a_source(source: str, message: str) -> InputError:
    kinds = f"give a folder, an archive ({', '.join(ARCHIVE_SUFFIXES)}), sdist:NAME==VERSION or git+URL@REF."
    return InputError("CR0402", message, where=source, fix=kinds)


def needs_no_path(source: str) -> bool:
    """Whether a SOURCE is fetched, so that it is the same from every folder."""
    return source.startswith("sdist:") or is_git_source(source)


def is_pinned(source: str) -> bool:
    """Whether a SOURCE names its bytes for good: an exact version, or a full commit id."""
    return source.startswith("sdist:") or (is_git_source(source) and names_commit(source))


def _fetch_sdist(source: str) -> tuple[Path, str]:
    """The file, and the pin as it is kept."""
    match = _PIN.fullmatch(source.removeprefix("sdist:").strip())
    if match is None:
        raise InputError(
            "CR0402",
            "the source is not sdist:NAME==VERSION.",
            where=source,
            fix="for example sdist:toolz==1.2.0",
        )
    return fetch_sdist(match[1], match[2]), f"sdist:{match[0]}"


def _is_text(name: str) -> bool:
    """Whether a record can name a file; one with bytes that are no text, or a line break, is left out."""
    return _NO_TEXT.search(name) is None


PYTEST_FILES = (
    "pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg",
)  # fmt: skip
"""Where pytest looks for its configuration, in its order. One may name the files of tests: then the first run tells whether any are."""


def _read(source: str, listing: Listing, fallback: str, commit: str = "") -> RepositorySource:
    """The files that enter the tree of a source, and those that declare its project.

    What content alone can choose is read behind the others: data that strings of its tests name, and packed data
    in which there is no code. ``fallback`` is its name where it says none.
    """
    names = [name for name in listing.files if _is_text(name)]
    rules = TreeRules(names)
    in_tree = {name for name in names if rules.belongs(PurePosixPath(name))}
    about = {name for name in names if is_metadata_path(PurePosixPath(name))}
    found = without_unused(listing.read(in_tree | about))
    named, packed = rules.named_data(found), rules.packed_data()
    with suppress(InputError):  # too large together: then they are among what is left out
        data = listing.read(named | packed)
        found |= {path: data[path] for path in data if path not in packed or not holds_code(data[path])}
    left_out = rules.left_out(found, frozenset(filter(_is_text, listing.links)))
    sums = "\n".join(f"{sha256_of(found[name])} {name}" for name in sorted(found))
    in_tree |= named | packed
    files = {name: data for name, data in sorted(found.items()) if name in in_tree}
    metadata = {name: data for name, data in sorted(found.items()) if name in about}
    _check_use(source, files, metadata)
    projects = find_projects({**metadata, **files})
    files |= _written_by_builds(projects, {**metadata, **files}, _safe(fallback), commit)
    name, version = _file_names(projects[0])
    version = version or commit[:_SHORT_ID]
    return RepositorySource(
        source, _safe(name or fallback), version, sha256_of(sums.encode()), files, metadata, commit, left_out
    )


def _check_use(source: str, files: Mapping[str, bytes], metadata: Collection[str]) -> None:
    """Refuse what is no Python project, or has no tests."""
    if not any(name in metadata for name in _PROJECT_FILES) or not any(
        name.endswith(".py") for name in files
    ):
        raise InputError(
            "CR0402",
            "this is not a Python project: no pyproject.toml, setup.cfg or setup.py with Python sources.",
            where=source,
            fix="give the folder that holds pyproject.toml.",
        )
    names_its_files = any(b"python_files" in files.get(name, b"") for name in PYTEST_FILES)
    if not names_its_files and not any(
        is_test_path(name) and _holds_tests(data) for name, data in files.items()
    ):
        raise InputError(
            "CR0419",
            "the project has no tests: no file test_*.py, *_test.py, test.py or tests.py, and none below a folder tests, test or testing, "
            "holds a test function or a TestCase (examples in docstrings hide nothing).",
            where=source,
            fix="give a checkout of the repository, for many archives leave tests out, or move the tests to tests/.",
        )


def _written_by_builds(
    projects: Sequence[Project], files: Mapping[str, bytes], fallback: str, commit: str
) -> dict[str, bytes]:
    """What an installation would add to the tree: metadata of each project, and version files.

    Some packages ask importlib.metadata for their own version or entry points; the long description stays out.
    Many checkouts leave the version to a tool that reads the tags: then it is 0, with the commit where there is one.
    """
    made: dict[str, bytes] = {}
    for project in projects:
        name, version = _file_names(project)
        made |= version_files(ProjectFiles(files, project.folder), version or "0")
        shown = version or (f"0+g{commit[:_SHORT_ID]}" if commit else "0")
        # The name of the folder is cut at its first hyphen by who looks it up.
        folder = f"{_safe(name or fallback).replace('-', '_')}-{shown}.dist-info"
        if name:
            made[f"{folder}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {shown}\n".encode()
            if project.entry_points:
                made[f"{folder}/entry_points.txt"] = _entry_points_text(project).encode()
        if project is projects[0]:
            roots = import_folders(projects, files)
            if roots != usual_folders(files):
                made[f"{folder}/{FOLDERS_FILE}"] = "".join(f"{root}\n" for root in roots).encode()
    return made


def _entry_points_text(project: Project) -> str:
    groups = sorted(project.entry_points.items())
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in groups
    )


def _file_names(project: Project) -> tuple[str, str]:
    """Name and version of a project where both can be parts of file names; else empty."""
    name, version = project.name.strip(), project.version.strip()
    return name if "\n" not in name else "", version if _VERSION.fullmatch(version) else ""


def _safe(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.sub(r"[^A-Za-z0-9._-]", "-", name)).strip("-").lower() or "repository"


def _holds_tests(data: bytes) -> bool:
    """A repository may call its tests otherwise (``python_functions``, pytest-describe): then what they assert tells."""
    return b"def test" in data or b"TestCase" in data or (b"def " in data and b"assert" in data)


# --- version files that only a build writes ---

_PYTHON = """\
__version__ = version = "{version}"
__version_tuple__ = version_tuple = {tuple}
__commit_id__ = commit_id = None
__git_version__ = git_version = full_version = short_version = __version__
release = True
TYPE_CHECKING = False


def get_versions():
    return {{"version": version, "full-revisionid": None, "dirty": False, "error": None, "date": None}}
"""
_TABLES = (
    "tool.setuptools_scm", "tool.setuptools-scm", "tool.hatch.build.hooks.*", "tool.hatch.build.targets.*.hooks.*",
    "tool.pdm.version", "tool.versioningit.write", "tool.scikit-build.generate.*", "tool.versioneer",
)  # fmt: skip
"""Where the tools name their file: by one of the keys below, with a template by one of the others."""
_KEYS = ("version_file", "write_to", "version-file", "file", "path", "versionfile_source")
_TEMPLATES = ("version_file_template", "write_to_template", "write_template", "template")
_SHIFTED = ("tool.pdm.version", "tool.scikit-build.generate.*")
"""Whose paths begin at the place of import."""
_PLACE = re.compile(r"\{(\w+)[^{}]*\}|\$\{\w+\}|@\w+@")
_MESON_CALL = re.compile(r"\b(configure_file|vcs_tag|custom_target)\s*\(((?:[^()]|\([^()]*\))*)\)")
_MESON_PATH = r"%s\s*:\s*\[?\s*(?:files\()?\s*'([^']+)'"


def version_files(read: ProjectFiles, version: str) -> dict[str, bytes]:
    """The missing files by path, for all tools that the project's files name; they say ``version``."""
    folders = {posixpath.dirname(path) for path in read.files}
    found: dict[str, bytes] = {}
    for declared, template in _declared(read):
        path = read.path(declared)
        is_inside = declared.strip() and ".." not in declared.split("/") and not path.startswith("/")
        if is_inside and path not in read.files and posixpath.dirname(path) in folders:
            found[path] = _filled(path, template, version).encode()
    return found


def _filled(path: str, template: str, version: str) -> str:
    release = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]] or [0]
    names = _PYTHON.format(version=version, tuple=(*release,))
    if not template:
        return names if path.endswith(".py") else f"{version}\n"

    def value(match: re.Match[str]) -> str:
        return str((*release,)) if match[1] == "version_tuple" else version

    filled = _PLACE.sub(value, template.replace("{}", version)).replace("{{", "{").replace("}}", "}")
    return names if path.endswith(".py") and parsed(filled) is None else filled


def _declared(read: ProjectFiles) -> Iterator[tuple[str, str]]:
    """Paths from the project's folder, each with its template (empty: the tool's own)."""
    tables = [(where, table) for where in _TABLES for table in values_at(read.toml, where)]
    for where, table in [*tables, ("setup.py", read.setup.get("use_scm_version"))]:
        if isinstance(table, Mapping):
            template = next((table[key] for key in _TEMPLATES if isinstance(table.get(key), str)), "")
            shifts = ("src", "python", *read.strings("tool.pdm.build.package-dir"))
            for path in (table[key] for key in _KEYS if isinstance(table.get(key), str)):
                for base in ("", *(shifts if where in _SHIFTED else ())):
                    yield posixpath.join(base, path), template
    for path, table in read.table("tool", "poetry-dynamic-versioning", "files").items():
        yield path, str(inner_table(table).get("initial-content") or "")
    for path in read.strings("tool.poetry-dynamic-versioning.substitution.files"):
        if "*" not in path:
            yield path, ""
    yield read.config.get("versioneer", {}).get("versionfile_source", ""), ""
    for path in sorted(read.files):
        if path.startswith(read.start) and posixpath.basename(path) == "meson.build":
            yield from _meson(read, posixpath.dirname(path.removeprefix(read.start)))


def _meson(read: ProjectFiles, folder: str) -> Iterator[tuple[str, str]]:
    """Python files that a ``meson.build`` makes: of a template with ``@NAMES@``, or a version by some command."""
    for call in _MESON_CALL.finditer(read.text(f"{folder}/meson.build" if folder else "meson.build")):
        output, source = (re.search(_MESON_PATH % key, call[2]) for key in ("output", "input"))
        if output is not None and output[1].endswith(".py") and "version" in output[1]:
            has_template = source is not None and call[1] != "custom_target"
            template = read.text(posixpath.join(folder, source[1])) if has_template and source else ""
            yield posixpath.join(folder, output[1]), template
