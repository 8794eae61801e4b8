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
    parse_ini,
    texts,
)
from composer_replication.tasks.intake.requirement_texts import (
    IN_TREE,
    parsed,
    poetry_range,
    poetry_requirements,
    read_file,
    table_address,
    with_marker,
)
from composer_replication.tasks.intake.setup_py import literal_in, setup_keywords
from composer_replication.tasks.intake.source_folders import USUAL_FOLDERS, declared_folders, is_place

_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
_POINT = re.compile(r"[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w, .-]*\])?")
_NO_POINT_NAME = re.compile(r"[\n=\[\]]")

_MAX_DEPTH = 2
"""How deep below a project its files of requirements lie at most."""

Groups = dict[str, list[Requirement]]


@dataclass(slots=True)
class Project:
    """One project of a repository, as declared.

    ``folder`` is where it lies (empty: at the top). ``dependencies`` are its own, ``extras`` its optional ones by
    extra, ``groups`` those of its developers by group, ``requirement_files`` those
    of the files that are called so by path. ``source_folders`` are where the build backend takes
    modules from, relative to the top; empty where nothing is said. ``entry_points`` are by group and name.
    ``unread`` names the file whose requirements only running it would tell. ``is_needed`` is for all but the
    members of a workspace that no other project asks for.
    """

    folder: str
    name: str = ""
    version: str = ""
    backend: str = ""
    requires_python: str = ""
    dependencies: list[Requirement] = field(default_factory=list)
    extras: Groups = field(default_factory=dict)
    groups: Groups = field(default_factory=dict)
    requirement_files: Groups = field(default_factory=dict)
    source_folders: tuple[str, ...] = ()
    entry_points: dict[str, dict[str, str]] = field(default_factory=dict)
    unread: str = ""
    is_needed: bool = True

    def all_requirements(self) -> Iterator[list[Requirement]]:
        """Each list of requirements that anything of it declares."""
        yield self.dependencies
        for part in (self.extras, self.groups, self.requirement_files):
            yield from part.values()

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
    project = Project(folder, *_name_and_version(read), read.backend, _requires_python(read))
    project.source_folders = declared_folders(read)
    _read_toml(project, read)
    _read_setuptools(project, read)
    _read_info(project, read)
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
    patterns: list[str] = []
    excluded: list[str] = []
    for table in (top.table("tool", "uv", "workspace"), top.table("tool", "rye", "workspace")):
        patterns += texts(table.get("members"))
        excluded += texts(table.get("exclude"))
    for environment in top.table("tool", "hatch", "envs").values():
        members = inner_table(environment, "workspace").get("members", [])
        for one in members if isinstance(members, list) else []:
            patterns += texts(one.get("path") if isinstance(one, Mapping) else one)
    folders = sorted(
        posixpath.dirname(path)
        for path in top.files
        if posixpath.basename(path) in ("pyproject.toml", "setup.py", "setup.cfg")
    )
    return [
        folder
        for folder in dict.fromkeys(folders)
        if any(_matches(folder, pattern) for pattern in patterns)
        and not any(_matches(folder, pattern) for pattern in excluded)
    ]


def _matches(folder: str, pattern: str) -> bool:
    """As a glob: a star stands for one part of a path."""
    parts, wanted = PurePosixPath(folder).parts, PurePosixPath(posixpath.normpath(pattern)).parts
    if "**" in wanted:
        return fnmatchcase(folder, pattern.replace("**/", "*"))
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _name_and_version(read: ProjectFiles) -> tuple[str, str]:
    """Where they are written down; a version that code computes, or a file that is not there holds, is empty."""
    if read.info.get("Name"):
        return read.info["Name"][0], (read.info.get("Version") or [""])[0]
    project, poetry = read.table("project"), read.table("tool", "poetry")
    written = [one for one in (project.get("name"), poetry.get("name")) if isinstance(one, str) and one]
    if written:
        version = next((str(one["version"]) for one in (project, poetry) if one.get("version")), "")
        return written[0], version or _dynamic_version(read)
    version = read.ini("metadata", "version") or str(read.setup.get("version", ""))
    if version.startswith(("attr:", "file:")):
        kind, _, what = version.partition(":")
        version = _version_at(read, {kind: what.strip()})
    return read.ini("metadata", "name") or str(read.setup.get("name", "")), version


def _dynamic_version(read: ProjectFiles) -> str:
    """A version that a backend reads from a module or a text of the repository."""
    if read.backend.startswith("flit") and "version" in texts(read.table("project").get("dynamic")):
        module = str(
            read.table("tool", "flit", "module").get("name") or read.table("project").get("name")
        ).replace("-", "_")
        return _version_at(read, {"attr": f"{module}.__version__"})
    for value in (
        read.table("tool", "setuptools", "dynamic", "version"),
        read.table("tool", "hatch", "version"),
        read.table("tool", "pdm", "version"),
    ):
        if value:
            return _version_at(read, value)
    return ""


def _version_at(read: ProjectFiles, where: Mapping[str, Any]) -> str:
    attribute, path = where.get("attr"), where.get("path")
    if isinstance(attribute, str):
        module, _, name = attribute.rpartition(".")
        bases = [f"{folder}{module.replace('.', '/')}" for folder in ("", "src/", "lib/", "python/")]
        paths = [f"{base}{end}" for base in bases for end in (".py", "/__init__.py")]
        return next((found for one in paths if (found := literal_in(read.read(read.path(one)), name))), "")
    if isinstance(path, str):
        data = read.read(read.path(path))
        return (
            literal_in(data, "__version__") or literal_in(data, "VERSION") or literal_in(data, "version")
            if path.endswith(".py")
            else data.decode("utf-8", "replace").strip()
        )
    named = texts(where.get("file"))
    return read.read(read.path(named[0])).decode("utf-8", "replace").strip() if named else ""


def _requires_python(read: ProjectFiles) -> str:
    for text in (
        read.table("project").get("requires-python"),
        next(iter(read.info.get("Requires-Python", [])), ""),
        read.ini("options", "python_requires"),
        read.setup.get("python_requires"),
    ):
        if isinstance(text, str) and text.strip():
            return text
    python = read.table("tool", "poetry", "dependencies").get("python")
    return str(poetry_range(python)) if isinstance(python, str) else ""


def _add(into: Groups, name: str, found: Iterable[Requirement]) -> None:
    into.setdefault(canonicalize_name(name), []).extend(found)


def _read_toml(project: Project, read: ProjectFiles) -> None:
    """What ``pyproject.toml`` says, in the tables of each tool."""
    standard, tool = read.table("project"), read.table("tool")
    project.dependencies += read.lines(standard.get("dependencies"))
    for name, lines in inner_table(standard, "optional-dependencies").items():
        _add(project.extras, name, read.lines(lines))
    groups = read.table("dependency-groups")
    for name in groups:
        _add(project.groups, name, read.lines(_expand(groups, name, frozenset({name}))))
    dynamic = inner_table(tool, "setuptools", "dynamic")
    project.dependencies += read.named(dynamic.get("dependencies"))
    for name, value in inner_table(dynamic, "optional-dependencies").items():
        _add(project.extras, name, read.named(value))
    hook = inner_table(tool, "hatch", "metadata", "hooks", "requirements_txt")
    project.dependencies += read.named(hook.get("files") or hook.get("filename"))
    for name, value in inner_table(hook, "optional-dependencies").items():
        _add(project.extras, name, read.named(value))
    for owner in ("uv", "pdm", "rye"):
        developed = inner_table(tool, owner).get("dev-dependencies")
        tables = developed if isinstance(developed, Mapping) else {"dev": developed}
        for name, lines in tables.items():
            _add(project.groups, name, read.lines(lines))
    for name, environment in inner_table(tool, "hatch", "envs").items():
        for key in ("dependencies", "extra-dependencies"):
            _add(project.groups, name, read.lines(inner_table(environment).get(key)))
    _read_poetry(project, inner_table(tool, "poetry"))
    if not project.dependencies and "dependencies" in texts(standard.get("dynamic")):
        project.dependencies += read.named(["requirements.txt"])


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


def _read_poetry(project: Project, poetry: Mapping[str, Any]) -> None:
    own = poetry_requirements(inner_table(poetry, "dependencies"), project.folder)
    project.dependencies += [requirement for requirement, is_optional in own if not is_optional]
    by_name = {canonicalize_name(requirement.name): requirement for requirement, _ in own}
    for extra, names in inner_table(poetry, "extras").items():
        wanted = [by_name.get(canonicalize_name(name)) for name in texts(names)]
        _add(project.extras, extra, [requirement for requirement in wanted if requirement is not None])
    groups = {"dev": inner_table(poetry, "dev-dependencies")}
    for name in inner_table(poetry, "group"):
        groups[name] = inner_table(poetry, "group", name, "dependencies")
    for name, table in groups.items():
        _add(project.groups, name, [one for one, _ in poetry_requirements(table, project.folder)])


def _read_setuptools(project: Project, read: ProjectFiles) -> None:
    """``setup.cfg`` and the arguments in ``setup.py``."""
    setup = read.setup
    project.dependencies += read.ini_lines(read.ini("options", "install_requires"))
    _add(project.groups, "tests", read.ini_lines(read.ini("options", "tests_require")))
    if read.config.has_section("options.extras_require"):
        for name, value in read.config.items("options.extras_require"):
            _add_extra(project, name, read.ini_lines(value))
    listed = setup.get("install_requires", setup.get("requires"))
    project.dependencies += read.lines(listed.splitlines() if isinstance(listed, str) else listed)
    is_computed = "install_requires" in setup_keywords(read.read(read.path("setup.py")))
    if listed is None and is_computed and not read.info.get("Requires-Dist"):
        usual = read.named(["requirements.txt"])
        project.dependencies += usual
        project.unread = "" if usual else read.path("setup.py")
    _add(project.groups, "tests", read.lines(setup.get("tests_require")))
    for name, value in inner_table(setup, "extras_require").items():
        _add_extra(project, name, read.lines(value))


def _add_extra(project: Project, key: str, found: list[Requirement]) -> None:
    """An extra as setuptools writes it: ``name``, ``name:marker``, or ``:marker`` for a plain dependency."""
    name, _, marker = key.partition(":")
    found = [with_marker(requirement, marker) for requirement in found]
    if name:
        _add(project.extras, name, found)
    else:
        project.dependencies += found


def _read_info(project: Project, read: ProjectFiles) -> None:
    """``Requires-Dist`` of an archive of sources; else ``requires.txt``, which an older setuptools packed."""
    rows = read.info.get("Requires-Dist", [])
    for requirement in filter(None, map(parsed, rows)):
        extras = dict.fromkeys(_EXTRA.findall(str(requirement.marker or "")))
        project.dependencies.append(requirement)  # if it is asked for without an extra
        for extra in extras:
            _add(project.extras, extra, [_asked_by(requirement, extra)])
    section = ""
    path = _packed(read, "requires.txt")
    for line in [] if rows else read.read(path).decode("utf-8", "replace").splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        elif line.strip():
            _add_extra(project, section or ":", read.lines([line]))


def _asked_by(requirement: Requirement, extra: str) -> Requirement:
    """The requirement, with a marker that knows of the extra: what is left of it holds or not on a machine."""
    copy = Requirement(str(requirement))
    copy.marker = None
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return with_marker(copy, "python_version < '0'")
    return copy


def _requirement_files(read: ProjectFiles) -> Iterator[tuple[str, list[Requirement]]]:
    """Texts that are called requirements, or lie in a folder that is, by their path in the project."""
    start = f"{read.folder}/" if read.folder else ""
    for path in read.files:
        pure = PurePosixPath(path.removeprefix(start))
        is_called_so = "requirement" in str(pure) or pure.parts[0] in ("requirements", "reqs")
        if (
            path.startswith(start)
            and pure.suffix in TEXT_SUFFIXES
            and is_called_so
            and len(pure.parts) <= _MAX_DEPTH
        ):
            yield str(pure), read_file(path, read.read, read.folder)


def _packed(read: ProjectFiles, name: str) -> str:
    """The path of a file of the ``egg-info`` that setuptools packs into an archive of sources."""
    start = f"{read.folder}/" if read.folder else ""
    found = (path for path in sorted(read.files) if path.endswith(f".egg-info/{name}"))
    return next((path for path in found if path.startswith(start)), "") if read.info else ""


def _bind_sources(project: Project, read: ProjectFiles) -> None:
    """Bind what ``[tool.uv.sources]`` binds: never by name from the index, whatever else names it."""
    top = ProjectFiles(read.files)
    tables = {**top.table("tool", "uv", "sources"), **read.table("tool", "uv", "sources")}
    bound: dict[str, str | None] = dict(
        _bound_by_poetry(read.table("tool", "poetry", "dependencies"), read.folder)
    )
    bound |= {canonicalize_name(name): _source(top, name, value) for name, value in tables.items()}
    for part in project.all_requirements():
        for requirement in part:
            url = bound.get(canonicalize_name(requirement.name))
            if url is not None and not requirement.url:
                requirement.url = url


def _bound_by_poetry(table: Mapping[str, Any], folder: str) -> Iterable[tuple[str, str]]:
    """The names that Poetry's table binds to a place, which also holds for those of ``[project]``."""
    for requirement, _ in poetry_requirements(table, folder):
        if requirement.url:
            yield canonicalize_name(requirement.name), requirement.url


def _source(top: ProjectFiles, name: str, value: object) -> str | None:
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, Mapping):
            continue
        probe = with_marker(Requirement("x"), str(one.get("marker", "")))
        if probe.marker is not None and not probe.marker.evaluate():
            continue
        if one.get("workspace"):
            for folder in member_folders(top):
                member = ProjectFiles(top.files, folder)
                if canonicalize_name(_name_and_version(member)[0]) == canonicalize_name(name):
                    return f"{IN_TREE}{folder}"
            return "another member of its workspace"
        return table_address(one, "")
    return None


def _expand_own_extras(project: Project) -> None:
    """``all = ["own-name[test]"]`` and ``-e .[test]`` stand for the extra itself."""
    own = canonicalize_name(project.name)

    def expand(part: list[Requirement], seen: frozenset[str]) -> list[Requirement]:
        found: list[Requirement] = []
        for requirement in part:
            is_own = requirement.url == f"{IN_TREE}{project.folder}" or (
                own and canonicalize_name(requirement.name) == own
            )
            if not is_own:
                found.append(requirement)
                continue
            for extra in map(canonicalize_name, sorted(requirement.extras)):
                if extra not in seen:
                    found += expand(project.extras.get(extra, []), seen | {extra})
        return found

    project.dependencies = expand(project.dependencies, frozenset())
    extras = {name: expand(part, frozenset({name})) for name, part in project.extras.items()}
    project.groups = {name: expand(part, frozenset()) for name, part in project.groups.items()}
    listed = project.requirement_files.items()
    project.requirement_files = {path: expand(part, frozenset()) for path, part in listed}
    project.extras = extras


def _entry_points(read: ProjectFiles) -> dict[str, dict[str, str]]:
    """Entry points by group and name, from whichever file declares them; only ones that a line can hold."""
    found: dict[str, dict[str, str]] = {}
    for group, points in (*_points_in_tables(read), *_points_in_lines(read)):
        for name, value in points.items():
            is_one = isinstance(value, str) and _POINT.fullmatch(value.strip())
            if is_one and not _NO_POINT_NAME.search(name + group):
                found.setdefault(group.strip(), {})[name.strip()] = value.strip()
    return found


def _points_in_tables(read: ProjectFiles) -> Iterator[tuple[str, dict[str, Any]]]:
    for owner in ("project", "tool.poetry"):
        keys = owner.split(".")
        yield "console_scripts", read.table(*keys, "scripts")
        yield "gui_scripts", read.table(*keys, "gui-scripts")
    for place in ("project.entry-points", "tool.poetry.plugins"):
        keys = place.split(".")
        for group in read.table(*keys):
            yield group, read.table(*keys, group)


def _points_in_lines(read: ProjectFiles) -> Iterator[tuple[str, dict[str, str]]]:
    """Those of ``setup.py``, ``setup.cfg`` and files called ``entry_points.txt``: ``name = module:object``."""
    declared = read.setup.get("entry_points")
    groups: list[tuple[str, Any]] = list(declared.items()) if isinstance(declared, Mapping) else []
    if read.config.has_section("options.entry_points"):
        groups += read.config.items("options.entry_points")
    dynamic = read.table("tool", "setuptools", "dynamic", "entry-points").get("file")
    paths = [_packed(read, "entry_points.txt"), *map(read.path, ["entry_points.txt", *texts(dynamic)])]
    for data in (*map(read.read, paths), declared.encode() if isinstance(declared, str) else b""):
        for group, section in parse_ini(data).items():
            yield group, dict(section)
    for group, value in groups:
        lines = value.splitlines() if isinstance(value, str) else texts(value)
        yield str(group), dict(line.split("=", 1) for line in lines if "=" in line)
