"""What a Python project declares about itself, wherever its tools write it; none of its code is run.

``read_project`` is the one reader of ``pyproject.toml``, ``setup.cfg``, ``setup.py`` (its syntax tree),
``PKG-INFO`` and ``METADATA``. What the requirements are used for is decided in ``requirements``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from composer_replication.tasks.intake.parsed_files import (
    TEXT_SUFFIXES,
    ProjectFiles,
    inner_table,
    literal_in,
    parse_ini,
    setup_keywords,
    texts,
    values_at,
)
from composer_replication.tasks.intake.requirement_texts import (
    IN_TREE,
    holds,
    parsed,
    poetry_range,
    poetry_requirements,
    table_address,
    with_marker,
)
from composer_replication.tasks.intake.tree_rules import USUAL_FOLDERS, is_place

PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
_POINT = re.compile(r"[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w, .-]*\])?")
_NO_POINT_NAME = re.compile(r"[\n=\[\]]")
_MAX_DEPTH = 2
"""How deep below a project its files of requirements lie at most."""

Groups = dict[str, list[Requirement]]


@dataclass(slots=True)
class Project:
    """One project of a repository, as declared.

    ``folder`` is where it lies (empty: at the top). ``dependencies`` are its own, ``groups`` its optional ones and
    those of its developers by extra or group, ``requirement_files`` those of the files that are called so by path.
    ``source_folders`` are where the build backend takes modules from, relative to the top; empty where nothing
    is said. ``entry_points`` are by group and name. ``unread`` names the file whose requirements only running
    it would tell. ``is_needed`` is for all but the members of a workspace that no other project asks for.
    """

    folder: str
    name: str = ""
    version: str = ""
    requires_python: str = ""
    dependencies: list[Requirement] = field(default_factory=list)
    groups: Groups = field(default_factory=dict)
    requirement_files: Groups = field(default_factory=dict)
    source_folders: tuple[str, ...] = ()
    entry_points: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: str = ""
    is_needed: bool = True

    def all_requirements(self) -> Iterator[list[Requirement]]:
        """Each list of requirements that anything of it declares."""
        yield self.dependencies
        yield from (*self.groups.values(), *self.requirement_files.values())

    def add(self, key: str, found: list[Requirement]) -> None:
        """Take what is asked for by an extra or a group: ``NAME``, ``NAME:MARKER``, ``:MARKER`` or nothing for its own."""
        name, _, marker = key.partition(":")
        part = self.groups.setdefault(canonicalize_name(name), []) if name else self.dependencies
        part += [with_marker(requirement, marker) for requirement in found]

    def accepts(self, python: str) -> bool:
        """Whether it says that it works with that version of Python, or says nothing."""
        try:
            return SpecifierSet(self.requires_python).contains(python, prereleases=True)
        except InvalidSpecifier:
            return True


def read_project(files: Mapping[str, bytes], folder: str = "") -> Project:
    """All that the project in a folder declares, from whichever of its files do.

    Args:
        files: of the whole repository, paths from its top.
        folder: where the project lies; empty for the top.
    """
    read = ProjectFiles(files, folder)
    project = Project(folder, *_name_and_version(read), _requires_python(read))
    project.source_folders = tuple(_source_folders(read))
    for key, found in (*_of_tables(read), *_of_poetry(read)):
        project.add(key, found)
    if not project.dependencies and "dependencies" in read.strings("project.dynamic"):
        project.add("", read.named("requirements.txt"))
    for key, found in (*_of_setuptools(read), *_of_archive(read)):
        project.add(key, found)
    is_read = "install_requires" in read.setup or "requires" in read.setup or read.info.get("Requires-Dist")
    if not is_read and "install_requires" in setup_keywords(read.read(read.path("setup.py"))):
        usual = read.named("requirements.txt")
        project.add("", usual)
        project.unread = "" if usual else read.path("setup.py")
    project.requirement_files = dict(_requirement_files(read))
    _bind_sources(project, read)
    _expand_own_extras(project)
    project.entry_points = _entry_points(read)
    return project


def find_projects(files: Mapping[str, bytes]) -> list[Project]:
    """The project at the top, then those that it needs by path, then the other members of its workspace.

    A folder that is needed by path counts as a project even where nothing in it declares one.
    """
    found: dict[str, Project] = {}

    def take(folder: str) -> None:
        if folder in found or not any(path.startswith(f"{folder}/") or not folder for path in files):
            return
        project = found[folder] = read_project(files, folder)
        for part in project.all_requirements():
            for requirement in part:
                if (requirement.url or "").startswith(IN_TREE):
                    take(str(requirement.url).removeprefix(IN_TREE))

    take("")
    num_needed = len(found)
    for folder in member_folders(ProjectFiles(files)):
        take(folder)
    for project in list(found.values())[num_needed:]:
        project.is_needed = False
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
    patterns = top.strings(
        "tool.uv.workspace.members", "tool.rye.workspace.members",
        "tool.hatch.envs.*.workspace.members", "tool.hatch.envs.*.workspace.members.*.path",
    )  # fmt: skip
    excluded = top.strings("tool.uv.workspace.exclude", "tool.rye.workspace.exclude")
    paths = (path.rpartition("/") for path in top.files)
    return [
        folder
        for folder in sorted({folder for folder, _, name in paths if name in PROJECT_FILES})
        if any(_matches(folder, one) for one in patterns)
        and not any(_matches(folder, one) for one in excluded)
    ]


def _matches(folder: str, pattern: str) -> bool:
    """As a glob: a star stands for one part of a path."""
    parts, wanted = PurePosixPath(folder).parts, PurePosixPath(posixpath.normpath(pattern)).parts
    if "**" in wanted:
        return fnmatchcase(folder, pattern.replace("**/", "*"))
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _name_and_version(read: ProjectFiles) -> tuple[str, str]:
    """Where they are written down; a version that code computes, or a file that is not there holds, is empty."""
    name, version = (next(iter(read.said(field)), "") for field in ("name", "version"))
    if version and not version.startswith(("attr:", "file:")):
        return name, version
    kind, _, what = version.partition(":")
    tools = (("setuptools", "dynamic", "version"), ("hatch", "version"), ("pdm", "version"))
    places = [{kind: what.strip()}, *(read.table("tool", *keys) for keys in tools)]
    if read.backend.startswith("flit"):
        module = next(iter(read.strings("tool.flit.module.name", "project.name")), "")
        places.append({"attr": f"{module.replace('-', '_')}.__version__"})
    return name, next(filter(None, (_version_at(read, place) for place in places)), "")


def _version_at(read: ProjectFiles, where: Mapping[str, Any]) -> str:
    """A version that a backend reads from a module or a text of the repository."""
    attribute, path = where.get("attr"), next(iter(texts(where.get("path") or where.get("file"))), "")
    if isinstance(attribute, str):
        module, _, name = attribute.rpartition(".")
        bases = [f"{folder}{module.replace('.', '/')}" for folder in ("", "src/", "lib/", "python/")]
        data = [read.read(read.path(f"{base}{end}")) for base in bases for end in (".py", "/__init__.py")]
        return next(filter(None, (literal_in(one, [name]) for one in data)), "")
    if path.endswith(".py"):
        return literal_in(read.read(read.path(path)), ("__version__", "VERSION", "version"))
    return read.text(path).strip() if path else ""


def _requires_python(read: ProjectFiles) -> str:
    poetry = (str(poetry_range(text)) for text in read.strings("tool.poetry.dependencies.python"))
    return next(filter(None, (*read.said("python"), *poetry)), "")


# --- Requirements: what each dialect says, by group (empty: the project's own).

_Said = Iterator[tuple[str, list[Requirement]]]


def _of_tables(read: ProjectFiles) -> _Said:
    """``pyproject.toml``: the standard tables, then those of setuptools, hatch, uv, rye and pdm."""
    yield "", read.lines(read.strings("project.dependencies"))
    for name, lines in read.table("project", "optional-dependencies").items():
        yield name, read.lines(lines)
    groups = read.table("dependency-groups")
    for name in groups:
        yield name, read.lines(_expand(groups, name, frozenset({name})))
    dynamic = read.table("tool", "setuptools", "dynamic")
    hook = read.table("tool", "hatch", "metadata", "hooks", "requirements_txt")
    for files in (dynamic.get("dependencies"), hook.get("files") or hook.get("filename")):
        yield "", read.named(files)
    for table in (dynamic, hook):
        for name, value in inner_table(table, "optional-dependencies").items():
            yield name, read.named(value)
    for owner in ("uv", "rye", "pdm"):
        yield "dev", read.lines(read.strings(f"tool.{owner}.dev-dependencies"))
    for name, lines in read.table("tool", "pdm", "dev-dependencies").items():
        yield name, read.lines(lines)
    for name, environment in read.table("tool", "hatch", "envs").items():
        for key in ("dependencies", "extra-dependencies"):
            yield name, read.lines(inner_table(environment).get(key))


def _expand(groups: Mapping[str, Any], name: str, seen: frozenset[str]) -> list[str]:
    """The lines of a group, included groups too."""
    listed = groups.get(name)
    found: list[str] = []
    for item in listed if isinstance(listed, list) else ():
        included = item.get("include-group") if isinstance(item, dict) else None
        if isinstance(item, str):
            found.append(item)
        elif isinstance(included, str):
            inner = next(
                (one for one in groups if canonicalize_name(one) == canonicalize_name(included)), included
            )
            found += [] if inner in seen else _expand(groups, inner, seen | {inner})
    return found


def _of_poetry(read: ProjectFiles) -> _Said:
    poetry = read.table("tool", "poetry")
    own = poetry_requirements(inner_table(poetry, "dependencies"), read.folder)
    yield "", [requirement for requirement, is_optional in own if not is_optional]
    by_name = {canonicalize_name(requirement.name): requirement for requirement, _ in own}
    for extra, names in inner_table(poetry, "extras").items():
        yield extra, [by_name[name] for name in map(canonicalize_name, texts(names)) if name in by_name]
    groups = {
        name: inner_table(group, "dependencies") for name, group in inner_table(poetry, "group").items()
    }
    for name, table in {"dev": inner_table(poetry, "dev-dependencies"), **groups}.items():
        yield name, [one for one, _ in poetry_requirements(table, read.folder)]


def _of_setuptools(read: ProjectFiles) -> _Said:
    """``setup.cfg`` and the arguments in ``setup.py``."""
    for told in read.told:
        yield "", read.lines(told.get("install_requires", told.get("requires")))
        yield "tests", read.lines(told.get("tests_require"))
        for key, value in inner_table(told, "extras_require").items():
            yield key, read.lines(value)


def _of_archive(read: ProjectFiles) -> _Said:
    """``Requires-Dist`` of an archive of sources; else ``requires.txt``, which an older setuptools packed."""
    rows = read.info.get("Requires-Dist", [])
    for requirement in filter(None, map(parsed, rows)):
        yield "", [requirement]  # if it is asked for without an extra
        for extra in dict.fromkeys(_EXTRA.findall(str(requirement.marker or ""))):
            if holds(requirement, extra):
                asked = Requirement(str(requirement))
                asked.marker = None
                yield extra, [asked]
    section = ""
    for line in [] if rows else _packed(read, "requires.txt").decode("utf-8", "replace").splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        elif line.strip():
            yield section, read.lines([line])


def _packed(read: ProjectFiles, name: str) -> bytes:
    """A file of the ``egg-info`` that setuptools packs into an archive of sources."""
    found = (path for path in sorted(read.files) if path.endswith(f".egg-info/{name}"))
    return next((read.read(path) for path in found if path.startswith(read.start)), b"") if read.info else b""


def _requirement_files(read: ProjectFiles) -> Iterator[tuple[str, list[Requirement]]]:
    """Texts that are called requirements, or lie in a folder that is, by their path in the project."""
    for path in read.files:
        name = path.removeprefix(read.start)
        is_called_so = "requirement" in name or name.startswith("reqs/")
        is_text = name.endswith(TEXT_SUFFIXES) and name.count("/") < _MAX_DEPTH
        if path.startswith(read.start) and is_called_so and is_text:
            yield name, read.lines_of_file(path)


def _bind_sources(project: Project, read: ProjectFiles) -> None:
    """Bind what ``[tool.uv.sources]`` or Poetry binds: never by name from the index, whatever else names it."""
    top = ProjectFiles(read.files)
    poetry = poetry_requirements(read.table("tool", "poetry", "dependencies"), read.folder)
    bound: dict[str, str | None] = {canonicalize_name(one.name): one.url for one, _ in poetry if one.url}
    for name, value in (top.table("tool", "uv", "sources") | read.table("tool", "uv", "sources")).items():
        bound[canonicalize_name(name)] = _source(top, name, value)
    for part in project.all_requirements():
        for requirement in part:
            requirement.url = requirement.url or bound.get(canonicalize_name(requirement.name))


def _source(top: ProjectFiles, name: str, value: object) -> str | None:
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, Mapping) or not holds(
            with_marker(Requirement("x"), str(one.get("marker", "")))
        ):
            continue
        if not one.get("workspace"):
            return table_address(one, "")
        for folder in member_folders(top):
            own_name = _name_and_version(ProjectFiles(top.files, folder))[0]
            if canonicalize_name(own_name) == canonicalize_name(name):
                return f"{IN_TREE}{folder}"
        return "another member of its workspace"
    return None


def _expand_own_extras(project: Project) -> None:
    """``all = ["own-name[test]"]`` and ``-e .[test]`` stand for the extra itself."""
    own = canonicalize_name(project.name)

    def expand(part: list[Requirement], seen: frozenset[str]) -> list[Requirement]:
        found: list[Requirement] = []
        for one in part:
            is_own = one.url == f"{IN_TREE}{project.folder}" or (own and canonicalize_name(one.name) == own)
            found += [] if is_own else [one]
            for extra in sorted(map(canonicalize_name, one.extras)) if is_own else ():
                if extra not in seen:
                    found += expand(project.groups.get(extra, []), seen | {extra})
        return found

    project.dependencies = expand(project.dependencies, frozenset())
    for groups in (project.groups, project.requirement_files):
        groups.update({name: expand(part, frozenset({name})) for name, part in groups.items()})


def _entry_points(read: ProjectFiles) -> dict[str, dict[str, str]]:
    """Entry points by group and name, from whichever file declares them; only ones that a line can hold."""
    groups: list[tuple[str, Any]] = []
    for table, plugins in (
        (read.table("project"), "entry-points"),
        (read.table("tool", "poetry"), "plugins"),
    ):
        groups += [("console_scripts", table.get("scripts")), ("gui_scripts", table.get("gui-scripts"))]
        groups += inner_table(table, plugins).items()
    named = ["entry_points.txt", *read.strings("tool.setuptools.dynamic.entry-points.file")]
    in_files = [_packed(read, "entry_points.txt"), *(read.read(read.path(name)) for name in named)]
    for declared in (*map(parse_ini, in_files), *(told.get("entry_points") for told in read.told)):
        groups += (
            parse_ini(declared.encode()) if isinstance(declared, str) else inner_table(declared)
        ).items()
    found: dict[str, dict[str, str]] = {}
    for group, value in groups:
        lines = value.splitlines() if isinstance(value, str) else texts(value)
        pairs = (line.split("=", 1) for line in lines if "=" in line)
        for name, point in value.items() if isinstance(value, Mapping) else pairs:
            is_one = isinstance(point, str) and _POINT.fullmatch(point.strip())
            if is_one and not _NO_POINT_NAME.search(f"{name}{group}"):
                found.setdefault(group.strip(), {})[name.strip()] = point.strip()
    return found


# --- Source folders: what a build backend is told.

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


def _source_folders(read: ProjectFiles) -> Iterator[str]:
    """The folders that the backend takes modules from, relative to the top, each once: inside, and with modules."""
    given: dict[str, None] = {}
    for folder in _given_folders(read):
        path = posixpath.normpath(posixpath.join(read.folder, folder.strip() or "."))
        start = "" if path == "." else f"{path}/"
        holds_modules = any(one.startswith(start) and one.endswith(".py") for one in read.files)
        if not path.startswith(("..", "/")) and holds_modules:
            given["" if path == "." else path] = None
    yield from given


def _given_folders(read: ProjectFiles) -> Iterator[str]:
    for folders in _package_folders(read):
        yield from _of_packages(folders)
    yield from read.strings(*_NAMED)
    for told in read.told:
        for key in ("packages", "py_modules"):
            for where in texts(inner_table(told, key).get("where")):
                yield from where.replace(",", "\n").split()
    for package in read.strings(*_PACKAGES):
        yield posixpath.dirname(posixpath.normpath(package)) or "."
    for table in (table for path in _SOURCES for table in values_at(read.toml, path)):
        if isinstance(table, Mapping):  # a folder, and what is put in its place
            yield from _of_packages({str(new): folder for folder, new in table.items()})
    if read.backend.startswith("uv"):
        yield from texts(read.table("tool", "uv", "build-backend").get("module-root", "src"))


def _package_folders(read: ProjectFiles) -> Iterator[Mapping[Any, Any]]:
    """What setuptools is told of each package: its folder."""
    yield read.table("tool", "setuptools", "package-dir")
    for told in read.told:
        given = told.get("package_dir")
        lines = given.splitlines() if isinstance(given, str) else []
        yield dict(line.split("=", 1) for line in lines if "=" in line) or inner_table(given)


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
