"""What the projects of a repository declare about themselves. What requirements are used for is decided in ``requirements``.

Each file is parsed once and told in tables as those of ``pyproject.toml``; a broken one is as good as empty, and none is run:
of a ``setup.py`` the syntax tree is read. Each requirement becomes one of ``packaging`` without a marker: one whose marker
does not hold on this machine is none. One that is bound to a place has ``url``: ``tree:FOLDER`` for a folder of this
repository, else the address as it is written. Such a name is never asked for at the package index.
"""

from __future__ import annotations

import ast
import configparser
import fnmatch
import platform
import posixpath
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from email.parser import Parser
from functools import cached_property
from itertools import product
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from packaging.markers import InvalidMarker, Marker, UndefinedComparison
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from composer_replication.tasks.intake.tree_rules import USUAL_FOLDERS, is_place
from composer_replication.tasks.syntax_trees import parsed

TEXT_SUFFIXES = (".txt", ".in")
_MOST_INCLUDED, _LONGEST_LINE = 20, 2_000
"""Files that one requirement file includes, and characters of a requirement: a hostile one may nest or count without end."""
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")


def parse_toml(data: bytes) -> dict[str, Any] | None:
    """The tables of a file; None when broken."""
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError):  # no TOML, no text, a number of thousands of digits
        return None


def parse_ini(text: str) -> dict[str, dict[str, str]]:
    """The sections of a file, ``DEFAULT`` among them, each with its values; empty when broken."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    return {name: dict(section) for name, section in parser.items()}


def texts(value: object) -> list[str]:
    """The strings of a list, or one string as a list."""
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def values_at(value: object, path: str) -> Iterator[Any]:
    """Whatever stands at a path of keys with dots between, in which ``*`` is each key of a table or item of a list."""
    key, _, rest = path.partition(".")
    if not path:
        yield value
    elif key == "*":
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for one in inner:
            yield from values_at(one, rest)
    elif isinstance(value, Mapping) and key in value:
        yield from values_at(value[key], rest)


def inner_table(table: object, path: str = "") -> dict[str, Any]:
    """The table at a path of keys; empty when absent, or when something else stands there."""
    found = next(values_at(table, path), None)
    return dict(found) if isinstance(found, Mapping) else {}


def pairs(value: object) -> dict[str, Any]:
    """A table, or one that is written as lines of ``NAME = VALUE``."""
    rows = (line.split("=", 1) for line in "\n".join(texts(value)).splitlines() if "=" in line)
    return dict(value) if isinstance(value, Mapping) else {name.strip(): one.strip() for name, one in rows}


_NO_GROUP = ("project", "dependencies", "extra-dependencies", "deps")
"""Keys that give no name to the requirements below them: the table around them does."""
_PLACES = (
    "tool.setuptools.package-dir", "tool.setuptools.packages.find.where", "tool.poetry.packages.*.from",
    "tool.hatch.build.targets.wheel.sources", "tool.hatch.build.targets.wheel.dev-mode-dirs", "tool.hatch.build.sources",
    "tool.hatch.build.dev-mode-dirs", "tool.hatch.build.targets.wheel.packages", "tool.hatch.build.packages",
    "tool.pdm.build.package-dir", "tool.maturin.python-source", "tool.scikit-build.wheel.packages",
    "tool.uv.build-backend.module-root",
)  # fmt: skip
"""Where places of import are named, by backend; ``packages`` are packages, each of which lies in its place of import."""
_VERSION = re.compile(r"""^(?:__version__|VERSION|version)\b[^=\n]*=\s*['"]([^'"]+)['"]""", re.MULTILINE)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}")
_POINT = re.compile(r"[^\n=\[\]]+\n[^\n=\[\]]+\n[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w, .-]*\])?")
"""Group, name and object of an entry point."""
_FOR_DEVELOPERS = re.compile(r"test|dev|doc|lint|build|extra|optional|tox|(^|\W)ci\b")
_MAX_DEPTH = 2  # how deep below a project its files of requirements lie at most
_MAX_TABLES, _MAX_EXTRAS = 8, 100
"""Tables in tables and extras of extras, which a hostile file may nest without end."""


class Project:
    """The files of one project in a folder of a repository, each parsed once, and what they declare.

    ``bound`` are names that a tool binds to a place. ``is_needed`` is for all but the members of a workspace that no other
    project asks for.
    """

    def __init__(self, files: Mapping[str, bytes], folder: str = "", *, is_needed: bool = True) -> None:
        self.files, self.folder, self.is_needed = files, folder, is_needed
        self.bound: dict[str, str] = {}

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.folder, name))

    def text(self, name: str) -> str:
        """A text by its path in the project, without a byte order mark."""
        return self.files.get(self.path(name), b"").decode("utf-8-sig", "replace")

    @cached_property
    def paths(self) -> list[str]:
        """What lies in the project's folder, by paths in the project."""
        start = f"{self.folder}/" if self.folder else ""
        return sorted(path.removeprefix(start) for path in self.files if path.startswith(start))

    @cached_property
    def toml(self) -> dict[str, Any]:
        return parse_toml(self.files.get(self.path("pyproject.toml"), b"")) or {}

    @cached_property
    def setup(self) -> dict[str, Any]:
        with suppress(RecursionError):  # a sum of thousands, or as many tables in each other
            return _setup_arguments(self.text("setup.py"))
        return {}

    @cached_property
    def declared(self) -> tuple[dict[str, Any], ...]:
        """What ``PKG-INFO``, ``pyproject.toml``, Poetry, ``setup.cfg`` and ``setup.py`` say, each in tables as the second has them."""
        config = parse_ini(self.text("setup.cfg"))
        given = {**config.get("metadata", {}), **config.get("options", {})}
        told: dict[str, Any] = {key.replace("-", "_"): value for key, value in given.items()}
        told |= {key: config.get(f"options.{key}") for key in ("extras_require", "entry_points")}
        told["versioneer"] = config.get("versioneer")
        poetry, info = _of_poetry(self.table("tool.poetry")), _of_package_info(self.text("PKG-INFO"))
        return info, self.toml, poetry, _of_setuptools(told), _of_setuptools(self.setup)

    def table(self, path: str) -> dict[str, Any]:
        """A table of ``pyproject.toml``."""
        return inner_table(self.toml, path)

    def strings(self, *paths: str) -> list[str]:
        """The strings that are declared at some paths (``values_at``), in their order."""
        found = (value for path in paths for table in self.declared for value in values_at(table, path))
        return [text for value in found for text in texts(value) if text.strip()]

    def lines(self, value: object, extra: str = "") -> list[Requirement]:
        """Requirements of a list or a text, as pip reads its lines; ``extra`` is that for which their markers are asked."""
        lines = self._lines("\n".join(texts(value)), "", set())
        short = (line for line in lines if len(line) <= _LONGEST_LINE)
        return [one for line in short if (one := _requirement_of(line, self.folder, extra))]

    def _lines(self, text: str, folder: str, seen: set[str]) -> Iterator[str]:
        """The lines of a requirement file in ``folder``, and of those that it includes but for ``seen``."""
        for raw in "\n".join(text.splitlines()).replace("\\\n", "").splitlines():
            line = " ".join(_ROOT.sub(".", _NO_PART.sub("", raw)).split())
            included = _INCLUDED.fullmatch(line)
            path = posixpath.normpath(posixpath.join(folder, included[1].strip("'\""))) if included else ""
            if not path:
                yield line
            elif path not in seen and len(seen) < _MOST_INCLUDED:
                seen.add(path)
                yield from self._lines(self.text(path), posixpath.dirname(path), seen)

    @cached_property
    def name(self) -> str:
        name = "".join(self.strings("project.name")[:1]).strip()
        return "" if "\n" in name else name

    @cached_property
    def version(self) -> str:
        """The version that is written down, in the module that setuptools or hatch reads it from, or in the package (flit).

        Empty where it could be no part of a file's name.
        """
        said = "".join(self.strings("project.version")[:1])
        if not said or said.startswith(("attr:", "file:")):
            places = ("setuptools.dynamic.version.attr", "hatch.version.path", "pdm.version.path")
            named = [said.removeprefix("attr:").strip(), *self.strings(*(f"tool.{one}" for one in places))]
            # Of an attribute the module, of a path all but its end.
            modules = [one.rpartition(".")[0].replace(".", "/") for one in named]
            if "flit" in "".join(self.strings("build-system.build-backend")):
                modules.append(self.name.replace("-", "_"))
            ends = tuple(f"/{module}{end}" for module in modules if module for end in (".py", "/__init__.py"))
            found = (self.text(path) for path in self.paths if f"/{path}".endswith(ends))
            said = next((match[1] for match in map(_VERSION.search, found) if match), "")
        return said.strip() if _FILE_NAME.fullmatch(said.strip()) else ""

    @cached_property
    def groups(self) -> dict[str, list[Requirement]]:
        """All requirements: its own by the empty name, those of extras and groups by theirs, those of files by path.

        What the project asks of itself is put in its place, and each is bound to where a tool binds it.
        """
        groups: dict[str, list[Requirement]] = {"": []}
        for key, lines in self._declared_lines():
            name, _, marker = key.partition(":")
            if holds(marker):
                groups.setdefault(canonicalize_name(name), []).extend(self.lines(lines, name))
        files = {path: self.lines(f"-r {path}") for path in self.paths if _holds_requirements(path)}
        setup = self.text("setup.py")
        is_dynamic = "install_requires" in setup or "dependencies" in self.strings("project.dynamic")
        if is_dynamic and not groups[""]:
            # The files of which setup.py has the names seem to be read there.
            named = [path for path in files if path.rpartition("/")[2] in setup]
            # A list that is written as empty may only be filled from a file that setup.py names.
            usual = [] if self.setup.get("install_requires") == [] else ["requirements.txt"]
            named = [path for path in named if not _FOR_DEVELOPERS.search(path)] or usual
            groups[""] = [one for path in named for one in files.get(path, [])]
        groups = files | groups
        here, own = f"{IN_TREE}{self.folder}", canonicalize_name(self.name)
        bound = self.bound | {own: here}
        for requirement in (one for part in groups.values() for one in part):
            requirement.url = requirement.url or bound.get(canonicalize_name(requirement.name))

        def expanded(name: str) -> Iterator[Requirement]:
            names = [name]
            for other in names:  # more are added on the way
                for one in groups.get(other, []):
                    if one.url != here and canonicalize_name(one.name) != own:
                        yield one
                    elif len(names) < _MAX_EXTRAS:
                        names += sorted(set(map(canonicalize_name, one.extras)).difference(names))

        return {name: [*expanded(name)] for name in groups}

    def _declared_lines(self) -> Iterator[tuple[str, list[str]]]:
        """Lists that are named like dependencies anywhere in what is declared, then what tox installs."""
        for table in self.declared:
            yield from _lists_in(table, "")
        dynamic = self.table("tool.setuptools.dynamic")
        extras = inner_table(dynamic, "optional-dependencies")
        for name, value in {"": dynamic.get("dependencies"), **extras}.items():
            yield name, [f"-r {path}" for path in texts(inner_table(value).get("file"))]
        for text in (self.text("tox.ini"), self.text("setup.cfg"), *self.strings("tool.tox.legacy_tox_ini")):
            for name, section in parse_ini(text).items():
                if "testenv" in name:
                    # A factor condition stands before the requirement: "py{38,39}: mock"
                    lines = section.get("deps", "").splitlines()
                    yield "tox", [re.sub(r"^[\w{},.!-]+:\s+", "", line.strip()) for line in lines]

    @cached_property
    def entry_points(self) -> dict[str, dict[str, str]]:
        """Entry points by group and name, from whichever file declares them; only ones that a line can hold."""
        found: dict[str, dict[str, str]] = {}
        for table in self.declared:
            project = inner_table(table, "project")
            scripts = ("console_scripts", project.get("scripts")), ("gui_scripts", project.get("gui-scripts"))
            for group, value in (*scripts, *inner_table(project, "entry-points").items()):
                for name, point in pairs(value).items():
                    if isinstance(point, str) and _POINT.fullmatch(f"{group}\n{name}\n{point.strip()}"):
                        found.setdefault(group.strip(), {})[name.strip()] = point.strip()
        return found

    def source_folders(self) -> Iterator[str]:
        """The folders that the backend takes modules from, relative to the top: inside, and with modules."""
        for place, table in product(_PLACES, self.declared):
            for value in values_at(table, place):
                # Of a table both sides: one is a folder, the other what is put in its place.
                given = texts([*value, *value.values()] if isinstance(value, dict) else value)
                for path in map(self.path, filter(None, given)):
                    is_package = place.endswith(".packages") or f"{path}/__init__.py" in self.files
                    folder = posixpath.dirname(path) if is_package else path.removeprefix(".")
                    start = f"{folder}/" if folder else ""
                    if any(one.startswith(start) and one.endswith(".py") for one in self.files):
                        yield folder


def _of_setuptools(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is said by the keywords of setuptools."""
    extras = {"tests-require": said.get("tests_require"), **inner_table(said.get("extras_require"))}
    points = said.get("entry_points")
    return {
        "project": {
            **{key: said.get(key) for key in ("name", "version", "license", "classifiers")},
            "requires-python": said.get("python_requires"),
            "dependencies": _named(said.get("install_requires", said.get("requires"))),
            "optional-dependencies": {key: _named(value) for key, value in extras.items()},
            "entry-points": parse_ini(points) if isinstance(points, str) else points,
        },
        "tool": {
            "setuptools": {"package-dir": pairs(said.get("package_dir"))},
            "setuptools_scm": said.get("use_scm_version"),
            "versioneer": said.get("versioneer"),
        },
    }


def _of_package_info(text: str) -> dict[str, Any]:
    """The header of ``PKG-INFO``, what an archive of sources says of itself."""
    said = Parser().parsestr(text, headersonly=True)
    lines = said.get_all("Requires-Dist", [])
    extras: dict[str, list[str]] = {}
    for line in lines:
        for extra in _EXTRA.findall(line):
            extras.setdefault(extra, []).append(line)
    project = {
        **{key: said[key] for key in ("name", "version", "requires-python")},
        "license": [said["License-Expression"], said["License"]],
        "classifiers": said.get_all("Classifier"),
        "dependencies": lines,
        "optional-dependencies": extras,
    }
    return {"project": project}


def _of_poetry(poetry: Mapping[str, Any]) -> dict[str, Any]:
    """What Poetry's own tables say: its groups are extras, too."""
    own = inner_table(poetry, "dependencies")
    groups = {"dev": inner_table(poetry, "dev-dependencies")}
    for name, group in inner_table(poetry, "group").items():
        groups[name] = inner_table(group, "dependencies")
    for extra, names in inner_table(poetry, "extras").items():
        groups[extra] = groups.get(extra, {}) | {name: own[name] for name in texts(names) if name in own}
    project = {
        **{key: poetry.get(key) for key in ("name", "version", "license", "classifiers")},
        "requires-python": own.get("python"),
        "dependencies": poetry_lines(own, with_optional=False),
        "optional-dependencies": {name: poetry_lines(group, name) for name, group in groups.items()},
        "entry-points": {"console_scripts": poetry.get("scripts"), **inner_table(poetry, "plugins")},
    }
    return {"project": project}


def _named(value: object) -> list[str]:
    """Lines; those of ``file: a.txt, b.txt`` are in the files that it names."""
    text = "\n".join(texts(value)).strip()
    names = text.removeprefix("file:").replace(",", " ").split()
    return [f"-r {name}" for name in names] if text.startswith("file:") else [text]


# --- What a setup.py hands to setup: strings, lists of strings, tables of these; None where only running would tell.

_MOST_STEPS, _MOST = 2_000, 5_000
"""Assignments and calls of a file; texts of a list or of all lists in a table, which a hostile file may double line by line."""


def _setup_arguments(text: str) -> dict[str, Any]:
    tree = parsed(text)
    kinds = ast.Assign | ast.AnnAssign | ast.Call
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)] if tree else []
    known: dict[str, Any] = {}
    calls: list[ast.expr] = []
    for node in sorted(nodes, key=lambda node: node.lineno)[:_MOST_STEPS]:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                known[name] = _value(value, known)
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=key)], value=value):
                known[name] = _value(ast.Dict([None, key], [ast.Name(name), value]), known)
            case ast.Call(func=ast.Name(id="setup") | ast.Attribute(attr="setup")):
                calls.append(node)
    return inner_table(_value(ast.Dict([None] * len(calls), calls), known))


def _value(node: ast.AST, known: Mapping[str, Any]) -> Any:
    found: Any = None
    match node:
        case ast.Constant(value=str() as text):
            found = text
        case ast.Name(id=name):
            found = known.get(name)
        case ast.List() | ast.Tuple() | ast.Set() | ast.Starred() | ast.BinOp(op=ast.Add()):
            parts = [_value(child, known) for child in ast.iter_child_nodes(node)]
            if isinstance(node, ast.BinOp):  # what is known of a sum of lists; texts are not added
                parts = [part for part in parts if isinstance(part, list)]
            # Each once: a list that is added to itself stays as it is.
            found = list(dict.fromkeys(text for part in parts for text in texts(part)))[:_MOST]
        case ast.Dict(keys=keys, values=values):
            found = {}
            for key, value in zip(keys, values, strict=True):
                given = _value(value, known)
                if key is None:
                    found |= inner_table(given)
                else:  # a table in a table has none itself
                    is_deep = isinstance(given, dict) and any(isinstance(one, dict) for one in given.values())
                    found[str(_value(key, known))] = None if is_deep else given
            sizes = (len(one) for one in found.values() if isinstance(one, list | dict))  # no text grows
            found = found if sum(sizes) <= _MOST else None
        case ast.Call(func=ast.Name(id="setup" | "dict") | ast.Attribute(attr="setup"), keywords=words):
            keys = [ast.Constant(word.arg) if word.arg else None for word in words]
            found = _value(ast.Dict(keys, [word.value for word in words]), known)
    return found


# --- Requirements as the ecosystem writes them: PEP 508, lines of requirement files, Poetry's tables.

IN_TREE = "tree:"
"""Before the folder of a requirement that lies in this repository."""
_NO_PART = re.compile(r"(^|\s)#.*|\s--?(hash|global-option|config-settings?|install-option|no-binary|C)\b.*")
"""Of a line: comments, and options behind a requirement."""
_INCLUDED = re.compile(r"-(?:r|-requirement)[\s=]*(.+)")
_LINE = re.compile(r"""(-(?:e|-editable)[\s=]*)?['"]?(.+?)(\[[\w., -]+\])?['"]?\s*(;.*)?""")
"""The parts of a line that is none of PEP 508: is it editable, address, extras, marker."""
_ADDRESS = re.compile(r"([\w+]+:|\.{1,2}(/|$)|/|git@|\.\[)|.*/|\S+\.(whl|zip|tar\.gz)$")
_ELSEWHERE = re.compile(r"[\w+]+:|git@|/|~|.*\.(whl|zip|tar\.gz)$")
_NAME = re.compile(r"(?:.*[#&]egg=|(?:[^#]*/)?\.*)(\w(?:(?!-\d|\.git|\.tar|\.zip)[\w.-])*)")
"""What an address seems to lead to; only the folder or the archive tells for certain."""
_ROOT = re.compile(
    r"(?:file:/*)?(?:\$\{PROJECT_ROOT\}|\{toxinidir\}|\{tox_root\}|\{root:uri\}|\{root:parent:uri\}|\{here\})"
)


def _parsed(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except (InvalidRequirement, RecursionError):
        return None


def holds(marker: Marker | str | None, extra: str = "") -> bool:
    """Whether a marker is true on this machine for this Python, with an extra or without one; a broken one is."""
    try:
        marker = Marker(marker) if isinstance(marker, str) and marker.strip() else marker
        return not isinstance(marker, Marker) or marker.evaluate({"extra": extra})
    except (InvalidMarker, UndefinedComparison, RecursionError):
        return True


def _requirement_of(line: str, folder: str, extra: str) -> Requirement | None:
    """What a line asks for here, if anything; ``folder`` is that of the project, which paths are relative to."""
    requirement = _parsed(line)
    if requirement is None and (found := _LINE.fullmatch(line)):
        editable, address, extras, marker = found.groups(default="")
        if not address.startswith("-") and (editable or _ADDRESS.match(address)):
            name = _NAME.match(address)
            requirement = _parsed(f"{name[1].rstrip('.-') if name else 'unnamed'}{extras}{marker}")
            if requirement is not None:
                requirement.url = address
    if requirement is None or not holds(requirement.marker, extra):
        return None
    requirement.url = requirement.url and bound_to(requirement.url, folder)
    requirement.marker = None
    return requirement


def bound_to(address: str, folder: str) -> str:
    """``tree:FOLDER`` for a path inside the repository, else the address itself."""
    path = unquote(address.partition("#")[0].removeprefix("file:"))
    inside = posixpath.normpath(posixpath.join(folder, path))
    if _ELSEWHERE.match(path) or inside.startswith(".."):
        return address
    return f"{IN_TREE}{'' if inside == '.' else inside}"


def table_address(value: Mapping[str, Any]) -> str:
    """Where a table of Poetry or uv binds a name to: a path, a repository, an address, another index; else empty."""
    for key in ("path", "file", "git", "url", "hg", "svn", "source", "index", "workspace"):
        if value.get(key):
            return f"{'file' if key == 'path' else key}:{value[key]}".replace(" ", "%20")
    return ""


def poetry_lines(table: Mapping[str, Any], extra: str = "", *, with_optional: bool = True) -> list[str]:
    """What Poetry's table of dependencies asks for here, as lines in PEP 508; ``python`` is none of them.

    Of alternative ranges (``||``), which PEP 508 has not, the last one is asked for.
    """
    found = []
    for name, given in table.items():
        for one in given if isinstance(given, list) else [given]:
            value = one if isinstance(one, Mapping) else {"version": one}
            fits = fits_python(str(value.get("python", ""))) and holds(str(value.get("markers", "")), extra)
            is_here = fits and value.get("platform", sys.platform) == sys.platform
            if is_here and name.lower() != "python" and (with_optional or not value.get("optional")):
                extras, address = ",".join(texts(value.get("extras"))), table_address(value)
                version = bounds_of(str(value.get("version", "")).rpartition("|")[2])
                found.append(f"{name}[{extras}]{f' @ {address}' if address else version}")
    return found


def fits_python(text: str) -> bool:
    """Whether a range of Pythons has the one that runs, in one of its alternatives (``||``); what cannot be read has it."""
    ranges = map(SpecifierSet, map(bounds_of, re.split(r"\|\|?", text)))
    try:
        return any(one.contains(platform.python_version(), prereleases=True) for one in ranges)
    except ValueError:  # a number of thousands of digits
        return True


def bounds_of(text: str) -> str:
    """A range as Poetry writes it, its upper bound kept: ``^1.2`` is ``>=1.2,==1.*``; empty where it cannot be read."""
    bounds: list[str] = []
    for operator, version in re.findall(r"([\^~<>=!]*)\s*v?(\d[\w.*+!-]*)", text):
        lowest = version.removesuffix(".*")
        parts = lowest.split(".")
        first = next((at for at, part in enumerate(parts) if part.strip("0")), len(parts) - 1)
        if operator in ("^", "~"):
            kept = parts[:2] if operator == "~" else parts[: first + 1]
            bounds += [f">={lowest}", f"=={'.'.join(kept)}.*"]
        elif operator in ("", "=", "==", "!="):
            bounds.append(f"{operator if len(operator) == 2 else '=='}{version}")
        else:
            bounds.append(f"{operator}{lowest}")
    with suppress(ValueError):
        return str(SpecifierSet(",".join(bounds)))
    return ""


# --- The projects of a repository: more than one where they ask for one another, or in a workspace.

PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")


def find_projects(files: Mapping[str, bytes]) -> list[Project]:
    """The project at the top, then those that it needs by path, then the other members of its workspace (uv, rye, hatch).

    A folder that is needed by path counts as a project even where nothing in it declares one. ``files`` are those of
    the whole repository, with paths from its top.
    """
    top = Project(files)
    folders = {posixpath.dirname(path) for path in files if posixpath.basename(path) in PROJECT_FILES}
    inside, outside = (
        _matching(folders, top.strings(f"tool.*.workspace.{key}", f"tool.hatch.envs.*.workspace.{key}"))
        for key in ("members", "exclude")
    )
    members = sorted(inside - outside)
    of_members = {canonicalize_name(Project(files, one).name): f"{IN_TREE}{one}" for one in members}
    found: dict[str, Project] = {}

    def take(folder: str, *, is_needed: bool) -> None:
        if folder in found or not any(path.startswith(f"{folder}/") or not folder for path in files):
            return
        found[folder] = project = Project(files, folder, is_needed=is_needed)
        sources = top.table("tool.uv.sources") | project.table("tool.uv.sources")
        project.bound = _bound_names(sources) | of_members
        for group, part in project.groups.items():
            for address in (one.url or "" for one in part):
                # What tox installs (an example, a plug-in of the tests) is none that the project needs.
                if address.startswith(IN_TREE) and group != "tox":
                    take(address.removeprefix(IN_TREE), is_needed=is_needed)

    take("", is_needed=True)
    for folder in members:
        take(folder, is_needed=False)
    return list(found.values())


def _matching(folders: Iterable[str], globs: Iterable[str]) -> set[str]:
    """The folders that globs name; only two stars stand for folders in folders, so no project in a test's data is a member."""
    return {
        folder
        for glob in map(posixpath.normpath, globs)
        for folder in fnmatch.filter(folders, glob.replace("**/", "*"))
        if "**" in glob or folder.count("/") == glob.count("/")
    }


def _bound_names(sources: Mapping[str, Any]) -> dict[str, str]:
    """What ``[tool.uv.sources]`` binds to a place: never by name from the index, whatever else names it."""
    bound: dict[str, str] = {}
    for name, value in sources.items():
        tables = map(inner_table, value if isinstance(value, list) else [value])
        here = next((one for one in tables if holds(str(one.get("marker", "")))), {})
        if address := table_address(here):
            bound[canonicalize_name(name)] = bound_to(address, "")
    return bound


def import_folders(projects: Iterable[Project], files: Collection[str]) -> list[str]:
    """The places of import of a repository, the top last as ``.``: what its projects declare, then the usual ones."""
    found: list[str] = []
    for project in projects:
        usual = [posixpath.join(project.folder, folder) for folder in USUAL_FOLDERS]
        own = [*project.source_folders(), *(folder for folder in usual if is_place(folder, files))]
        found += own or [project.folder]
    return [*dict.fromkeys(filter(None, found)), "."]


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


# --- Version files that only a build writes: where its tools name them, and what they would say. No code is run.

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
_VERSION_TABLES = (
    "setuptools_scm", "setuptools-scm", "hatch.build.hooks.*", "hatch.build.targets.*.hooks.*", "pdm.version",
    "versioningit.write", "scikit-build.generate.*", "versioneer",
)  # fmt: skip
"""Below ``tool``: where a tool names its file by one of the keys below, with a template by one of the others."""
_FILE_KEYS = ("version_file", "write_to", "version-file", "file", "path", "versionfile_source")
_TEMPLATES = ("version_file_template", "write_to_template", "write_template", "template")
_PLACE = re.compile(r"\{(\w*+)(?:[!:.][^{}]*+)?\}|\$\{\w++\}|@\w++@")
_OF_MESON = re.compile(r"\boutput\s*:\s*\[?\s*'(\w*version\w*\.py)'")


def version_files(project: Project, version: str) -> dict[str, bytes]:
    """The missing files by path, for all tools that the project's files name; they say ``version``."""
    folders = {str(one) for path in project.files for one in PurePosixPath(path).parents}
    numbers = (*map(int, re.findall(r"\d+", version.partition("+")[0])[:3]),)
    values, found = {"version_tuple": str(numbers)}, dict[str, bytes]()
    for declared, template in _version_places(project):
        path = project.path(declared)
        is_inside = ".." not in declared and (posixpath.dirname(path) or ".") in folders
        if is_inside and path not in folders and path not in project.files and declared.isprintable():
            is_python = path.endswith(".py")
            text = _PLACE.sub(lambda place: values.get(place[1], version), template)
            if not text or (is_python and parsed(text) is None):
                text = _PYTHON.format(version=version, tuple=numbers) if is_python else f"{version}\n"
            found.setdefault(path, text.encode())
    return found


def _version_places(project: Project) -> Iterator[tuple[str, str]]:
    """Paths from the project's folder, each with its template (empty: the tool's own)."""
    for name, declared in product(_VERSION_TABLES, project.declared):
        for table in map(inner_table, values_at(declared, f"tool.{name}")):
            template = next((table[key] for key in _TEMPLATES if isinstance(table.get(key), str)), "")
            # Some count from the place of import; a file that is there is the one that is meant.
            paths = texts([*map(table.get, _FILE_KEYS)])
            for base, path in product(("", "src", "python"), paths):
                if path and project.path(path) not in project.files:
                    yield posixpath.join(base, path), template
    for path, table in project.table("tool.poetry-dynamic-versioning.files").items():
        yield path, str(inner_table(table).get("initial-content") or "")
    for path in project.paths:
        if path.endswith(".py.in") and "version" in posixpath.basename(path):  # a template of meson
            yield path.removesuffix(".in"), project.text(path)
    for path in project.paths:
        if posixpath.basename(path) == "meson.build":
            for output in _OF_MESON.findall(project.text(path)):
                yield posixpath.join(posixpath.dirname(path), output), ""
