"""What the projects of a repository declare about themselves. What requirements are used for is decided in ``requirements``."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from composer_replication.tasks.intake.parsed_files import (
    IN_TREE,
    TEXT_SUFFIXES,
    ProjectFiles,
    bound_to,
    holds,
    inner_table,
    parse_ini,
    table_address,
    texts,
    values_at,
)
from composer_replication.tasks.intake.tree_rules import USUAL_FOLDERS, is_place

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")
_VERSION = re.compile(r"""^(?:__version__|VERSION|version)\b[^=\n]*=\s*['"]([^'"]+)['"]""", re.MULTILINE)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}")
_POINT = re.compile(r"[^\n=\[\]]+\n[^\n=\[\]]+\n[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w, .-]*\])?")
"""Group, name and object of an entry point."""
_FOR_DEVELOPERS = re.compile(r"test|dev|doc|lint|build|extra|optional|tox|(^|\W)ci\b")
_MAX_DEPTH = 2  # how deep below a project its files of requirements lie at most
_MAX_TABLES, _MAX_EXTRAS = (
    20,
    100,
)  # of tables in tables and extras of extras, which a hostile file may nest without end


@dataclass(slots=True)
class Project:
    """One project of a repository, as declared.

    ``folder`` is where it lies (empty: at the top). ``name`` and ``version`` are empty where they could be no part of a
    file's name. ``groups`` are requirements: its own by the empty name, those of extras and groups of developers by
    theirs, those of files that are called so by path. ``source_folders`` are where the build backend takes modules from,
    relative to the top. ``is_needed`` is for all but the members of a workspace that no other project asks for.
    """

    folder: str
    name: str
    version: str
    requires_python: str
    groups: dict[str, list[Requirement]]
    source_folders: tuple[str, ...]
    entry_points: dict[str, dict[str, str]]
    is_needed: bool


def find_projects(files: Mapping[str, bytes]) -> list[Project]:
    """The project at the top, then those that it needs by path, then the other members of its workspace (uv, rye, hatch).

    A folder that is needed by path counts as a project even where nothing in it declares one. ``files`` are those of
    the whole repository, with paths from its top.
    """
    top = ProjectFiles(files)
    folders = {posixpath.dirname(path) for path in files if posixpath.basename(path) in PROJECT_FILES}
    inside, outside = (
        top.strings(*(f"tool.{tool}.workspace.{key}" for tool in ("uv", "rye", "hatch", "hatch.envs.*")))
        for key in ("members", "exclude")
    )
    members = [one for one in sorted(folders) if _is_among(one, inside) and not _is_among(one, outside)]
    places = {
        canonicalize_name(name): f"{IN_TREE}{folder}"
        for folder in reversed(members)
        for name in ProjectFiles(files, folder).strings("project.name")
    }
    found: dict[str, Project] = {}

    def take(folder: str, *, is_needed: bool) -> None:
        if folder in found or not any(path.startswith(f"{folder}/") or not folder for path in files):
            return
        read = ProjectFiles(files, folder) if folder else top
        bound = _bound_names(top.table("tool.uv.sources") | read.table("tool.uv.sources"), places)
        name, python = (next(iter(read.strings(f"project.{key}")), "") for key in ("name", "requires-python"))
        name, version = "" if "\n" in name.strip() else name.strip(), _version(read).strip()
        version = version if _FILE_NAME.fullmatch(version) else ""
        groups = _groups(read, canonicalize_name(name), bound)
        sources, points = tuple(_source_folders(read)), _entry_points(read)
        found[folder] = Project(folder, name, version, python, groups, sources, points, is_needed)
        # What tox installs (an example, a plug-in of the tests) is none that the project needs.
        addresses = [one.url or "" for group, part in groups.items() for one in part if group != "tox"]
        for address in (one for one in addresses if one.startswith(IN_TREE)):
            take(address.removeprefix(IN_TREE), is_needed=is_needed)

    take("", is_needed=True)
    for folder in members:
        take(folder, is_needed=False)
    return list(found.values())


def _is_among(folder: str, patterns: Iterable[str]) -> bool:
    """Whether a glob names a folder: a star stands for one part of a path, two for any number."""
    return any(
        fnmatchcase(folder, pattern.replace("**/", "*"))
        and ("**" in pattern or folder.count("/") == pattern.count("/"))
        for pattern in map(posixpath.normpath, patterns)
    )


def _bound_names(sources: Mapping[str, Any], members: Mapping[Any, str]) -> dict[str, str]:
    """What ``[tool.uv.sources]`` binds to a place: never by name from the index, whatever else names it."""
    bound: dict[str, str] = {}
    for name, value in sources.items():
        tables = map(inner_table, value if isinstance(value, list) else [value])
        here = next((one for one in tables if holds(str(one.get("marker", "")))), {})
        own = canonicalize_name(name)
        if here.get("workspace"):
            bound[own] = members.get(own, "another member of its workspace")
        elif address := table_address(here):
            bound[own] = bound_to(address, "")
    return bound


def import_folders(projects: Iterable[Project], files: Collection[str]) -> list[str]:
    """The places of import of a repository, the top last as ``.``: what its projects declare, then the usual ones."""
    found: list[str] = []
    for project in projects:
        usual = [posixpath.join(project.folder, folder) for folder in USUAL_FOLDERS]
        own = [*project.source_folders, *(folder for folder in usual if is_place(folder, files))]
        found += own or [project.folder]
    return [*dict.fromkeys(filter(None, found)), "."]


def _version(read: ProjectFiles) -> str:
    """The version that is written down, in the module that setuptools or hatch reads it from, or in the package (flit)."""
    said = next(iter(read.strings("project.version")), "")
    if said and not said.startswith(("attr:", "file:")):
        return said
    attributes = [said.removeprefix("attr:").strip(), *read.strings("tool.setuptools.dynamic.version.attr")]
    modules = [attribute.rpartition(".")[0].replace(".", "/") for attribute in attributes]
    paths = read.strings("tool.hatch.version.path", "tool.pdm.version.path")
    modules += [path.removesuffix(".py") for path in paths]
    if "flit" in "".join(read.strings("build-system.build-backend")):
        modules += [name.replace("-", "_") for name in read.strings("project.name")]
    ends = tuple(f"/{module}{end}" for module in modules if module for end in (".py", "/__init__.py"))
    found = (data for path, data in read.files.items() if f"/{path}".endswith(ends))
    matches = (_VERSION.search(data.decode("utf-8-sig", "replace")) for data in found)
    return next((match[1] for match in matches if match), "")


# --- Requirements by group (empty: the project's own).

_NO_GROUP = ("project", "dependencies", "extra-dependencies", "deps")
"""Keys that give no name to the requirements below them: the table around them does."""


def _groups(read: ProjectFiles, own: str, bound: Mapping[str, str]) -> dict[str, list[Requirement]]:
    """All requirements, with what ``own`` asks of itself put in its place, and each bound to where a tool binds it."""
    groups: dict[str, list[Requirement]] = {"": []}
    for key, lines in _declared_lines(read):
        name, _, marker = key.partition(":")
        if holds(marker):
            groups.setdefault(canonicalize_name(name), []).extend(read.lines(lines, name))
    start = f"{read.folder}/" if read.folder else ""
    paths = (path.removeprefix(start) for path in read.files if path.startswith(start))
    files = {path: read.lines(f"-r {path}") for path in paths if _holds_requirements(path)}
    setup = read.text("setup.py")
    said = read.setup.get("install_requires")
    is_computed = "install_requires" in setup and not said
    if not groups[""] and (is_computed or "dependencies" in read.strings("project.dynamic")):
        # The files of which setup.py has the names seem to be read there.
        named = [one for one in files if posixpath.basename(one) in setup and not _FOR_DEVELOPERS.search(one)]
        # A list that is written as empty may only be filled from a file that setup.py names.
        usual = ["requirements.txt"] if said is None else []
        groups[""] = [one for path in named or usual for one in files.get(path, [])]
    groups = files | groups
    for requirement in (one for part in groups.values() for one in part):
        requirement.url = requirement.url or bound.get(canonicalize_name(requirement.name))

    def expanded(name: str) -> Iterator[Requirement]:
        names = [name]
        for other in names:  # more are added on the way
            for one in groups.get(other, []):
                if one.url != f"{IN_TREE}{read.folder}" and (not own or canonicalize_name(one.name) != own):
                    yield one
                elif len(names) < _MAX_EXTRAS:
                    names += sorted(set(map(canonicalize_name, one.extras)).difference(names))

    return {name: [*expanded(name)] for name in groups}


def _declared_lines(read: ProjectFiles) -> Iterator[tuple[str, list[str]]]:
    """Lists that are named like dependencies anywhere in what is declared, then what tox installs."""
    for table in read.declared:
        yield from _lists_in(table, "")
    dynamic = read.table("tool.setuptools.dynamic")
    extras = inner_table(dynamic, "optional-dependencies")
    for name, value in {"": dynamic.get("dependencies"), **extras}.items():
        yield name, [f"-r {path}" for path in texts(inner_table(value).get("file"))]
    for text in (read.text("tox.ini"), read.text("setup.cfg"), *read.strings("tool.tox.legacy_tox_ini")):
        for name, section in parse_ini(text).items():
            if "testenv" in name:
                # A factor condition stands before the requirement: "py{38,39}: mock"
                lines = section.get("deps", "").splitlines()
                yield "tox", [re.sub(r"^[\w{},.!-]+:\s+", "", line.strip()) for line in lines]


def _lists_in(table: Mapping[str, Any], name: str, depth: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Those of the standard tables, and of uv, pdm, hatch and tox, which are all called alike."""
    for key, inner in table.items():
        group = name if key in _NO_GROUP else key
        if isinstance(inner, dict) and depth < _MAX_TABLES:
            yield from _lists_in(inner, group, depth + 1)
        elif isinstance(inner, list) and ("depend" in f"{name} {key}" or key == "deps"):
            included = filter(None, (inner_table(one).get("include-group") for one in inner))
            # A group includes another as an extra does.
            yield group.removesuffix("-dependencies"), [*texts(inner), *(f".[{one}]" for one in included)]


def _holds_requirements(path: str) -> bool:
    """Whether a text is called requirements (or reqs, deps …), or lies in a folder that is."""
    is_called = "requirement" in path or path.startswith(("reqs", "requires.", "deps.", "dependencies."))
    return is_called and path.endswith(TEXT_SUFFIXES) and path.count("/") < _MAX_DEPTH


# --- What an installation would show: entry points, source folders.


def _entry_points(read: ProjectFiles) -> dict[str, dict[str, str]]:
    """Entry points by group and name, from whichever file declares them; only ones that a line can hold."""
    found: dict[str, dict[str, str]] = {}
    for table in read.declared:
        project = inner_table(table, "project")
        scripts = ("console_scripts", project.get("scripts")), ("gui_scripts", project.get("gui-scripts"))
        for group, value in (*scripts, *inner_table(project, "entry-points").items()):
            pairs = [line.split("=", 1) for line in "\n".join(texts(value)).splitlines() if "=" in line]
            for name, point in value.items() if isinstance(value, dict) else pairs:
                if isinstance(point, str) and _POINT.fullmatch(f"{group}\n{name}\n{point.strip()}"):
                    found.setdefault(group.strip(), {})[name.strip()] = point.strip()
    return found


_PLACES = (
    "tool.setuptools.package-dir", "tool.setuptools.packages.find.where", "tool.poetry.packages.*.from",
    "tool.hatch.build.targets.wheel.sources", "tool.hatch.build.targets.wheel.dev-mode-dirs", "tool.hatch.build.sources",
    "tool.hatch.build.dev-mode-dirs", "tool.hatch.build.targets.wheel.packages", "tool.hatch.build.packages",
    "tool.pdm.build.package-dir", "tool.maturin.python-source", "tool.scikit-build.wheel.packages",
    "tool.uv.build-backend.module-root",
)  # fmt: skip
"""Where places of import are named, by backend; ``packages`` are packages, each of which lies in its place of import."""


def _source_folders(read: ProjectFiles) -> Iterator[str]:
    """The folders that the backend takes modules from, relative to the top: inside, and with modules."""
    for place in _PLACES:
        for value in (value for table in read.declared for value in values_at(table, place)):
            # Of a table both sides: one is a folder, the other what is put in its place.
            given = texts([*value, *value.values()] if isinstance(value, dict) else value)
            for folder in filter(None, (part.strip() for text in given for part in re.split(r"[,\n]", text))):
                path = read.path(folder)
                if place.endswith(".packages") or f"{path}/__init__.py" in read.files:
                    path = posixpath.dirname(path) or "."
                start = "" if path == "." else f"{path}/"
                if any(one.startswith(start) and one.endswith(".py") for one in read.files):
                    yield start.rstrip("/")
