"""What a Python project declares about itself, wherever its tools write it; none of its code is run.

``read_project`` is the one reader of ``pyproject.toml``, ``setup.cfg``, ``setup.py`` (its syntax tree),
``PKG-INFO`` and files of requirements. What the requirements are used for is decided in ``requirements``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from composer_replication.tasks.intake.parsed_files import (
    TEXT_SUFFIXES,
    ProjectFiles,
    inner_table,
    parse_ini,
    texts,
    values_at,
)
from composer_replication.tasks.intake.requirement_texts import (
    IN_TREE,
    bound_to,
    holds,
    table_address,
)
from composer_replication.tasks.intake.tree_rules import USUAL_FOLDERS, is_place

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")
_VERSION = re.compile(r"""^(?:__version__|VERSION|version)\b[^=\n]*=\s*['"]([^'"]+)['"]""", re.MULTILINE)
_POINT = re.compile(r"[^\n=\[\]]+\n[^\n=\[\]]+\n[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w, .-]*\])?")
"""Group, name and object of an entry point."""
_FOR_DEVELOPERS = re.compile(r"test|dev|doc|lint|build|extra|optional|tox|(^|\W)ci\b")
_MAX_DEPTH = 2
"""How deep below a project its files of requirements lie at most."""


@dataclass(slots=True)
class Project:
    """One project of a repository, as declared.

    ``folder`` is where it lies (empty: at the top). ``groups`` are requirements: its own by the empty name, those of
    extras and groups of developers by theirs, those of files that are called so by path. ``source_folders`` are where
    the build backend takes modules from, relative to the top; empty where nothing is said. ``entry_points`` are by
    group and name. ``is_needed`` is for all but the members of a workspace that no other project asks for.
    """

    folder: str
    name: str = ""
    version: str = ""
    requires_python: str = ""
    groups: dict[str, list[Requirement]] = field(default_factory=dict)
    source_folders: tuple[str, ...] = ()
    entry_points: dict[str, dict[str, str]] = field(default_factory=dict)
    is_needed: bool = True


def read_project(files: Mapping[str, bytes], folder: str = "") -> Project:
    """All that the project in a folder declares, from whichever of its files do.

    Args:
        files: of the whole repository, paths from its top.
        folder: where the project lies; empty for the top.
    """
    read = ProjectFiles(files, folder)
    name, python = (next(iter(read.strings(f"project.{key}")), "") for key in ("name", "requires-python"))
    return Project(
        folder,
        name,
        _version(read),
        python,
        _groups(read, canonicalize_name(name)),
        tuple(_source_folders(read)),
        _entry_points(read),
    )


def find_projects(files: Mapping[str, bytes]) -> list[Project]:
    """The project at the top, then those that it needs by path, then the other members of its workspace.

    A folder that is needed by path counts as a project even where nothing in it declares one.
    """
    found: dict[str, Project] = {}

    def take(folder: str, *, is_needed: bool) -> None:
        if folder in found or not any(path.startswith(f"{folder}/") or not folder for path in files):
            return
        project = found[folder] = read_project(files, folder)
        project.is_needed = is_needed
        # What tox installs (an example, a plug-in of the tests) is none that the project needs.
        for requirement in (one for name, part in project.groups.items() for one in part if name != "tox"):
            if requirement.url is not None and requirement.url.startswith(IN_TREE):
                take(requirement.url.removeprefix(IN_TREE), is_needed=is_needed)

    take("", is_needed=True)
    for folder in member_folders(ProjectFiles(files)):
        take(folder, is_needed=False)
    return list(found.values())


def import_folders(projects: Iterable[Project], files: Collection[str]) -> list[str]:
    """The places of import of a repository, the top last as ``.``: what its projects declare, then the usual ones."""
    found: list[str] = []
    for project in projects:
        usual = [posixpath.join(project.folder, folder) for folder in USUAL_FOLDERS]
        own = [*project.source_folders, *(folder for folder in usual if is_place(folder, files))]
        found += own or [project.folder]
    return [*dict.fromkeys(filter(None, found)), "."]


def member_folders(top: ProjectFiles) -> list[str]:
    """The folders of a workspace's members (uv, rye, hatch), which all lie in the repository."""
    tables = (
        "tool.uv.workspace",
        "tool.rye.workspace",
        "tool.hatch.envs.*.workspace",
        "tool.hatch.workspace",
    )
    members, excluded = (
        top.strings(*(f"{table}.{key}" for table in tables)) for key in ("members", "exclude")
    )
    found = {posixpath.dirname(path) for path in top.files if posixpath.basename(path) in PROJECT_FILES}
    return [one for one in sorted(found) if _is_among(one, members) and not _is_among(one, excluded)]


def _is_among(folder: str, patterns: Iterable[str]) -> bool:
    """Whether a glob names a folder: a star stands for one part of a path, two for any number."""
    return any(
        fnmatchcase(folder, pattern.replace("**/", "*"))
        and ("**" in pattern or folder.count("/") == pattern.count("/"))
        for pattern in map(posixpath.normpath, patterns)
    )


def _version(read: ProjectFiles) -> str:
    """The version that is written down, in the module that setuptools or hatch reads it from, or in the package (flit)."""
    said = next(iter(read.strings("project.version")), "")
    if said and not said.startswith(("attr:", "file:")):
        return said
    attributes = [said.removeprefix("attr:").strip(), *read.strings("tool.setuptools.dynamic.version.attr")]
    modules = [attribute.rpartition(".")[0].replace(".", "/") for attribute in attributes]
    modules += [
        path.removesuffix(".py") for path in read.strings("tool.hatch.version.path", "tool.pdm.version.path")
    ]
    if "flit" in "".join(read.strings("build-system.build-backend")):
        modules += [name.replace("-", "_") for name in read.strings("project.name")]
    ends = tuple(f"/{module}{end}" for module in modules if module for end in (".py", "/__init__.py"))
    paths = (path for path in read.files if f"/{path}".endswith(ends))
    found = (_VERSION.search(read.text_at(path)) for path in paths)
    return next((match[1] for match in found if match), "")


# --- Requirements by group (empty: the project's own).

_NO_GROUP = ("project", "dependencies", "extra-dependencies", "deps")
"""Keys that give no name to the requirements below them: the table around them does."""


def _groups(read: ProjectFiles, own: str) -> dict[str, list[Requirement]]:
    """All requirements, with what ``own`` asks of itself put in its place, and each bound to where a tool binds it."""
    groups: dict[str, list[Requirement]] = {"": []}
    for key, lines in _declared_lines(read):
        name, _, marker = key.partition(":")
        if holds(marker):
            groups.setdefault(canonicalize_name(name), []).extend(read.lines(lines))
    files = {path: read.lines_of_file(read.path(path)) for path in _requirement_files(read)}
    setup = read.text("setup.py")
    is_computed = "install_requires" in setup and read.setup.get("install_requires") is None
    if not groups[""] and (is_computed or "dependencies" in read.strings("project.dynamic")):
        # The files of which setup.py has the names seem to be read there.
        named = [one for one in files if posixpath.basename(one) in setup and not _FOR_DEVELOPERS.search(one)]
        groups[""] = [one for path in named or ["requirements.txt"] for one in files.get(path, [])]
    groups = files | groups
    bound = _bound_names(read)
    for requirement in (one for part in groups.values() for one in part):
        requirement.url = requirement.url or bound.get(canonicalize_name(requirement.name))

    def expand(part: list[Requirement], seen: set[str]) -> Iterator[Requirement]:
        for one in part:
            if one.url != f"{IN_TREE}{read.folder}" and (not own or canonicalize_name(one.name) != own):
                yield one
                continue
            for extra in sorted(set(map(canonicalize_name, one.extras)) - seen):
                seen.add(extra)
                yield from expand(groups.get(extra, []), seen)

    return {name: [*expand(part, {name})] for name, part in groups.items()}


def _declared_lines(read: ProjectFiles) -> Iterator[tuple[str, list[str]]]:
    """Lists that are named like dependencies anywhere in what is declared, then what tox installs."""
    for table in read.declared:
        yield from _lists_in(table, "")
    dynamic = read.table("tool", "setuptools", "dynamic")
    for name, value in {
        "": dynamic.get("dependencies"),
        **inner_table(dynamic, "optional-dependencies"),
    }.items():
        yield name, [f"-r {path}" for path in texts(inner_table(value).get("file"))]
    for text in (read.text("tox.ini"), read.text("setup.cfg"), *read.strings("tool.tox.legacy_tox_ini")):
        for name, section in parse_ini(text).items():
            if "testenv" in name:
                # A factor condition stands before the requirement: "py{38,39}: mock"
                lines = section.get("deps", "").splitlines()
                yield "tox", [re.sub(r"^[\w{},.!-]+:\s+", "", line.strip()) for line in lines]


def _lists_in(table: Mapping[str, Any], name: str) -> Iterator[tuple[str, list[str]]]:
    """Those of the standard tables, and of uv, pdm, hatch and tox, which are all called alike."""
    for key, inner in table.items():
        group = name if key in _NO_GROUP else key
        if isinstance(inner, dict):
            yield from _lists_in(inner, group)
        elif isinstance(inner, list) and ("depend" in f"{name} {key}" or key == "deps"):
            included = filter(None, (inner_table(one).get("include-group") for one in inner))
            # A group includes another as an extra does.
            yield group.removesuffix("-dependencies"), [*texts(inner), *(f".[{one}]" for one in included)]


def _requirement_files(read: ProjectFiles) -> Iterator[str]:
    """Texts that are called requirements (or reqs, deps …), or lie in a folder that is, by their path in the project."""
    for path in read.files:
        name = path.removeprefix(read.start)
        is_called_so = "requirement" in name or name.startswith(
            ("reqs", "requires.", "deps.", "dependencies.")
        )
        is_text = name.endswith(TEXT_SUFFIXES) and name.count("/") < _MAX_DEPTH
        if path.startswith(read.start) and is_called_so and is_text:
            yield name


def _bound_names(read: ProjectFiles) -> dict[str, str | None]:
    """What ``[tool.uv.sources]`` binds to a place: never by name from the index, whatever else names it."""
    top = ProjectFiles(read.files)
    bound: dict[str, str | None] = {}
    for name, value in (top.table("tool", "uv", "sources") | read.table("tool", "uv", "sources")).items():
        sources = [inner_table(one) for one in (value if isinstance(value, list) else [value])]
        here = next((one for one in sources if holds(str(one.get("marker", "")))), {})
        address = table_address(here)
        bound[canonicalize_name(name)] = (
            _member(top, name) if here.get("workspace") else bound_to(address, "") if address else None
        )
    return bound


def _member(top: ProjectFiles, name: str) -> str:
    for folder in member_folders(top):
        own = ProjectFiles(top.files, folder).strings("project.name")
        if canonicalize_name(name) in map(canonicalize_name, own):
            return f"{IN_TREE}{folder}"
    return "another member of its workspace"


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


# --- Source folders: what a build backend is told.

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
                path = posixpath.normpath(posixpath.join(read.folder, folder))
                if place.endswith(".packages") or f"{path}/__init__.py" in read.files:
                    path = posixpath.dirname(path) or "."
                start = "" if path == "." else f"{path}/"
                if any(one.startswith(start) and one.endswith(".py") for one in read.files):
                    yield start.rstrip("/")
