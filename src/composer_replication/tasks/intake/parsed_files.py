"""The files that declare a Python project, each parsed once; a broken one is as good as empty. None is run.

Whichever file says it, it is told in tables as those of ``pyproject.toml``; of a ``setup.py`` the syntax tree is read.
Each requirement becomes one of ``packaging`` without a marker: one whose marker does not hold on this machine is none.
One that is bound to a place has ``url``: ``tree:FOLDER`` for a folder of this repository, else the address as it
is written. Such a name is never asked for at the package index.
"""

from __future__ import annotations

import ast
import configparser
import platform
import posixpath
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from packaging.markers import InvalidMarker, Marker, UndefinedComparison
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

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


class ProjectFiles:
    """The files of one project in a folder of a repository, each parsed once."""

    def __init__(self, files: Mapping[str, bytes], folder: str = "") -> None:
        self.files = files
        self.folder = folder

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.folder, name))

    def text(self, name: str) -> str:
        """A text by its path in the project, without a byte order mark."""
        return self.files.get(self.path(name), b"").decode("utf-8-sig", "replace")

    @cached_property
    def toml(self) -> dict[str, Any]:
        return parse_toml(self.files.get(self.path("pyproject.toml"), b"")) or {}

    @cached_property
    def setup(self) -> dict[str, Any]:
        return _SetupFile(self.text("setup.py")).arguments()

    @cached_property
    def declared(self) -> tuple[dict[str, Any], ...]:
        """What ``PKG-INFO``, ``pyproject.toml``, Poetry, ``setup.cfg`` and ``setup.py`` say, each in tables as the second has them."""
        config = parse_ini(self.text("setup.cfg"))
        given = {**config.get("metadata", {}), **config.get("options", {})}
        told: dict[str, Any] = {key.replace("-", "_"): value for key, value in given.items()}
        told |= {key: config.get(f"options.{key}") for key in ("extras_require", "entry_points")}
        told |= {"packages": config.get("options.packages.find"), "versioneer": config.get("versioneer")}
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
            line = _ROOT.sub(".", _NO_PART.sub("", raw)).strip()
            included = _INCLUDED.fullmatch(line)
            path = posixpath.normpath(posixpath.join(folder, included[1].strip("'\""))) if included else ""
            if not path:
                yield line
            elif path not in seen and len(seen) < _MOST_INCLUDED:
                seen.add(path)
                yield from self._lines(self.text(path), posixpath.dirname(path), seen)


def _of_setuptools(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is said by the keywords of setuptools."""
    extras = {"tests-require": said.get("tests_require"), **inner_table(said.get("extras_require"))}
    folders, points = said.get("package_dir"), said.get("entry_points")
    if isinstance(folders, str):
        rows = (line.split("=", 1) for line in folders.splitlines() if "=" in line)
        folders = {package.strip(): folder.strip() for package, folder in rows}
    return {
        "project": {
            **{key: said.get(key) for key in ("name", "version", "license", "classifiers")},
            "requires-python": said.get("python_requires"),
            "dependencies": _named(said.get("install_requires", said.get("requires"))),
            "optional-dependencies": {key: _named(value) for key, value in extras.items()},
            "entry-points": parse_ini(points) if isinstance(points, str) else points,
        },
        "tool": {
            "setuptools": {"package-dir": folders, "packages": {"find": said.get("packages")}},
            "setuptools_scm": said.get("use_scm_version"),
            "versioneer": said.get("versioneer"),
        },
    }


def _of_package_info(text: str) -> dict[str, Any]:
    """The header of ``PKG-INFO``, what an archive of sources says of itself."""
    said = Parser().parsestr(text, headersonly=True)
    lines = said.get_all("Requires-Dist", [])
    extras = _EXTRA.findall("\n".join(lines))
    project = {
        "name": said["Name"],
        "version": said["Version"],
        "license": [said["License-Expression"], said["License"]],
        "classifiers": said.get_all("Classifier"),
        "requires-python": said["Requires-Python"],
        "dependencies": lines,
        "optional-dependencies": {extra: [line for line in lines if extra in line] for extra in extras},
    }
    return {"project": project}


def _of_poetry(poetry: Mapping[str, Any]) -> dict[str, Any]:
    """What Poetry's own tables say: its groups are extras, too."""
    own = inner_table(poetry, "dependencies")
    groups = {"dev": inner_table(poetry, "dev-dependencies")}
    for name, group in inner_table(poetry, "group").items():
        groups[name] = inner_table(group, "dependencies")
    for extra, names in inner_table(poetry, "extras").items():
        wanted = set(map(canonicalize_name, texts(names)))
        of_extra = {name: given for name, given in own.items() if canonicalize_name(name) in wanted}
        groups[extra] = groups.get(extra, {}) | of_extra
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


# --- What a setup.py hands to setup.

_MOST_ASSIGNMENTS = 200
"""To one name; a hostile file may have it grow line by line."""


class _SetupFile:
    """A ``setup.py`` as text: strings, lists of strings and tables of these; None where only running would tell."""

    def __init__(self, text: str) -> None:
        tree = parsed(text)
        nodes = list(ast.walk(tree)) if tree else []
        self._known: dict[str, Any] = {}
        self._given: dict[str, list[ast.expr]] = {}
        self._calls = [
            (None, node) for node in nodes if isinstance(node, ast.Call) and _called(node) == "setup"
        ]
        for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._given.setdefault(name, []).append(value)
                case ast.Assign(
                    targets=[ast.Subscript(value=ast.Name(id=name) as table, slice=key)], value=value
                ):
                    more = ast.Dict([None, key], [table, value])  # {**table, key: value}
                    self._given.setdefault(name, []).append(more)

    def arguments(self) -> dict[str, Any]:
        """All that is handed to ``setup``."""
        try:
            return self._table(self._calls)
        except RecursionError:  # a sum of thousands, or as many tables in each other
            return {}

    def _named(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = None
            for node in self._given.get(name, [])[:_MOST_ASSIGNMENTS]:
                self._known[name] = self._value(node)  # which may be built of what it was before
        return self._known[name]

    def _value(self, node: ast.AST) -> Any:
        found: Any = None
        match node:
            case ast.Constant(value=str() as text):
                found = text
            case ast.Name(id=name):
                found = self._named(name)
            case ast.List() | ast.Tuple() | ast.Set() | ast.Starred() | ast.BinOp(op=ast.Add()):
                # Each once: a list that is added to itself stays as it is. What is known of a sum is better than nothing.
                parts = map(self._value, ast.iter_child_nodes(node))
                found = list(dict.fromkeys(text for part in parts for text in texts(part)))
            case ast.Dict(keys=keys, values=values):
                names = (None if key is None else str(self._value(key)) for key in keys)
                found = self._table(zip(names, values, strict=True))
            case ast.Subscript(value=table, slice=ast.Constant(value=str() as key)):
                found = inner_table(self._value(table)).get(key)
            case ast.Call(keywords=words) if _called(node) in ("dict", "setup"):
                found = self._table((word.arg, word.value) for word in words)
            case ast.Call(args=args, keywords=words) if _called(node) in (
                "find_packages",
                "find_namespace_packages",
            ):
                where = [*args, *(word.value for word in words if word.arg == "where")]
                found = {"where": self._value(where[0])} if where else None
        return found

    def _table(self, items: Iterable[tuple[str | None, ast.expr]]) -> dict[str, Any]:
        """Keys with their values; what stands without a key is a table itself (``**more``)."""
        found: dict[str, Any] = {}
        for key, node in items:
            value = self._value(node)
            found |= inner_table(value) if key is None else {key: value}
        return found


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


# --- Requirements as the ecosystem writes them: PEP 508, lines of requirement files, Poetry's tables.

IN_TREE = "tree:"
"""Before the folder of a requirement that lies in this repository."""
_NO_PART = re.compile(r"(^|\s)#.*|\s--?(hash|global-option|config-settings?|install-option|no-binary|C)\b.*")
"""Of a line: comments, and options behind a requirement."""
_INCLUDED = re.compile(r"-(?:r|-requirement)[\s=]*(.+)")
_LINE = re.compile(r"""(-(?:e|-editable)[\s=]*)?['"]?(.+?)/?(\[[\w., -]+\])?['"]?\s*(;.*)?""")
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
    for key in ("path", "file", "git", "url", "hg", "svn", "source", "index"):
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
    try:
        ranges = map(SpecifierSet, map(bounds_of, re.split(r"\|\|?", text)))
        return any(one.contains(platform.python_version(), prereleases=True) for one in ranges)
    except ValueError:
        return True


def bounds_of(text: str) -> str:
    """A range as Poetry writes it, its upper bound kept: ``^1.2`` is ``>=1.2,==1.*``."""
    bounds = []
    for operator, version in re.findall(r"([\^~<>=!]*)\s*v?(\d[\w.*+!-]*)", text):
        parts = version.split(".")
        first = next((at for at, part in enumerate(parts) if part.strip("0")), len(parts) - 1)
        if operator in ("^", "~"):
            kept = parts[:2] if operator == "~" else parts[: first + 1]
            bounds += [f">={version}", f"=={'.'.join(kept)}.*"]
        else:
            bounds.append(f"{'==' if operator in ('', '=') else operator}{version}")
    return ",".join(bounds)
