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
from itertools import islice
from typing import Any
from urllib.parse import unquote

from packaging.markers import InvalidMarker, Marker, UndefinedComparison
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from composer_replication.tasks.syntax_trees import parsed

TEXT_SUFFIXES = (".txt", ".in")
_MOST_INCLUDED, _LONGEST_LINE = 20, 2_000
"""Files that one requirement file includes, and characters of a requirement: a hostile one may nest or count without end."""
_FINDERS = ("find_packages", "find_namespace_packages")
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
        return _setup_arguments(self.text("setup.py"))

    @cached_property
    def declared(self) -> tuple[dict[str, Any], ...]:
        """What ``PKG-INFO``, ``pyproject.toml``, Poetry, ``setup.cfg`` and ``setup.py`` say, each in tables as the second has them."""
        config = parse_ini(self.text("setup.cfg"))
        told: dict[str, Any] = {**config.get("metadata", {}), **config.get("options", {})}
        told = {key.replace("-", "_"): value for key, value in told.items()}
        for key in ("packages.find", "extras_require", "entry_points"):
            told[key.partition(".")[0]] = config.get(f"options.{key}")
        told["versioneer"] = config.get("versioneer")
        poetry = _of_poetry(self.table("tool.poetry"))
        told_by_setup = map(_of_setuptools, (told, self.setup))
        return _of_package_info(self.text("PKG-INFO")), self.toml, poetry, *told_by_setup

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
    groups: dict[str, list[str]] = {"": []}
    for line in said.get_all("Requires-Dist", []):
        for extra in ("", *dict.fromkeys(_EXTRA.findall(line))):
            groups.setdefault(extra, []).append(line)
    project = {
        "name": said["Name"],
        "version": said["Version"],
        "license": [said["License-Expression"], said["License"]],
        "classifiers": said.get_all("Classifier"),
        "requires-python": said["Requires-Python"],
        "dependencies": groups.pop(""),
        "optional-dependencies": groups,
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
    pythons = [one for text in texts(own.get("python")) for one in poetry_ranges(text)]
    pythons.sort(key=fits_python, reverse=True)  # the first one is looked at
    project = {
        **{key: poetry.get(key) for key in ("name", "version", "license", "classifiers")},
        "requires-python": list(map(str, pythons)),
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

_MOST_ASSIGNMENTS, _MOST = 2_000, 20_000
"""Of a file; and of the characters of a text, or the parts of a list or table, which a hostile file may double line by line."""


def _setup_arguments(text: str) -> dict[str, Any]:
    """The arguments of ``setup``: strings, lists of strings, tables of these; None where only running would tell."""
    tree = parsed(text)
    nodes = list(ast.walk(tree)) if tree else []
    assignments = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)]
    assignments.sort(key=lambda node: node.lineno)
    known: dict[str, Any] = {}
    # Twice, as a function may name what is given below it.
    for node in 2 * assignments[:_MOST_ASSIGNMENTS]:
        match node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value:
            case ast.Name(name), ast.expr() as value:
                known[name] = _value(value, known)
            case ast.Subscript(ast.Name(name) as table, ast.Constant(str()) as key), ast.expr() as value:
                known[name] = _value(ast.Dict([None, key], [table, value]), known)  # {**table, key: value}
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called(node) == "setup"]
    return _table([(word.arg, word.value) for call in calls for word in call.keywords], known)


def _table(items: Iterable[tuple[str | None, ast.expr]], known: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with their values; what stands without a key is a table itself (``**more``)."""
    found: dict[str, Any] = {}
    for key, node in items:
        value = _value(node, known)
        found |= inner_table(value) if key is None else {key: value}
    return found


def _value(node: ast.expr | None, known: Mapping[str, Any]) -> Any:
    """A string, the strings of a list, or a table of these; None is what only running would tell."""
    found: Any = None
    try:
        match node:
            case ast.Constant(value=str() as text):
                found = text
            case ast.Name(id=name):
                found = known.get(name)
            case ast.Starred(value=part):
                found = _value(part, known)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                inner = (text for part in parts for text in texts(_value(part, known)))
                found = list(islice(inner, _MOST + 1))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                found = _sum(_value(left, known), _value(right, known))
            case ast.Dict(keys=keys, values=values):
                names = (None if key is None else str(_value(key, known)) for key in keys)
                found = _table(zip(names, values, strict=True), known)
            case ast.Subscript(value=table, slice=ast.Constant(value=str() as key)):
                found = inner_table(_value(table, known)).get(key)
            case ast.Call(func=ast.Name(id="dict"), keywords=words):
                found = _table(((word.arg, word.value) for word in words), known)
            case ast.Call(args=args, keywords=words) if _called(node) in _FINDERS:
                where = [*args, *(word.value for word in words if word.arg == "where")]
                found = {"where": _value(where[0], known)} if where else None
        # What is too large is unknown as a whole: the beginning of a text may name another requirement.
        return found if _size(found) <= _MOST else None
    except RecursionError:  # a sum of thousands, or as many tables in each other
        return None


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return len(value) if isinstance(value, list | str) else 1


def _sum(*sides: Any) -> Any:
    """Two texts in one; of two lists what is known of either, which is better than nothing."""
    if any(isinstance(side, list) for side in sides):
        return [text for side in sides if isinstance(side, list) for text in side]
    return "".join(sides) if all(isinstance(side, str) for side in sides) else None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


# --- Requirements as the ecosystem writes them: PEP 508, lines of requirement files, Poetry's tables.

IN_TREE = "tree:"
"""Before the folder of a requirement that lies in this repository."""
_NO_PART = re.compile(r"(^|\s)#.*|\s--?(hash|global-option|config-settings?|install-option|no-binary|C)\b.*")
"""Of a line: comments, and options behind a requirement."""
_INCLUDED = re.compile(r"-(?:r|-requirement)[\s=]*(.+)")
_EDITABLE = re.compile(r"-(?:e|-editable)[\s=]*(.+)")
_ADDRESS = re.compile(r"([\w+]+:|\.{1,2}(/|$)|/|git@|\.\[)|.*/|\S+\.(whl|zip|tar\.gz)$")
_ELSEWHERE = re.compile(r"[\w+]+:|git@|/|~|.*\.(whl|zip|tar\.gz)$")
_NAME = re.compile(r"(?:.*[#&]egg=|(?:[^#]*/)?\.*)(\w(?:(?!-\d|\.git|\.tar|\.zip)[\w.-])*)")
"""What an address seems to lead to; only the folder or the archive tells for certain."""
_EXTRAS = re.compile(r"\[([\w., -]+)\]\s*$")
_LOCAL_FILE = re.compile(r"file:(?://(?:localhost)?)?(/?\.{1,2}(?:/.*)?|[^/].*)")
_ROOT = re.compile(r"\$\{PROJECT_ROOT\}|\{toxinidir\}|\{tox_root\}|\{root:uri\}|\{root:parent:uri\}|\{here\}")


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
    editable = _EDITABLE.fullmatch(line)
    line = editable[1].strip("'\"") if editable else line
    requirement = None if editable else _parsed(line)
    if requirement is None and (editable or _ADDRESS.match(line)) and not line.startswith("-"):
        address, _, marker = line.partition(";")
        extras = _EXTRAS.search(address)
        address = _EXTRAS.sub("", address).strip().rstrip("/")
        name = _NAME.match(address)
        text = f"{name[1].rstrip('.-') if name else 'unnamed'}{extras[0] if extras else ''}"
        requirement = _parsed(f"{text};{marker}" if marker.strip() else text)
        if requirement is not None:
            requirement.url = address
    if requirement is None or not holds(requirement.marker, extra):
        return None
    requirement.url = requirement.url and bound_to(requirement.url, folder)
    requirement.marker = None
    return requirement


def bound_to(address: str, folder: str) -> str:
    """``tree:FOLDER`` for a path inside the repository, else the address itself."""
    text = _ROOT.sub(".", address).partition("#")[0]
    local = _LOCAL_FILE.fullmatch(text)
    text = local[1].lstrip("/") if local else text
    path = posixpath.normpath(posixpath.join(folder, unquote(text)))
    if _ELSEWHERE.match(text) or path.startswith(".."):
        return address
    return f"{IN_TREE}{'' if path == '.' else path}"


def table_address(value: Mapping[str, Any]) -> str:
    """Where a table of Poetry or uv binds a name to: a path, a repository, an address, another index; else empty."""
    for key in ("path", "file", "git", "url", "hg", "svn", "source", "index"):
        if value.get(key):
            return f"{'file' if key == 'path' else key}:{value[key]}".replace(" ", "%20")
    return ""


def poetry_lines(table: Mapping[str, Any], extra: str = "", *, with_optional: bool = True) -> list[str]:
    """What Poetry's table of dependencies asks for here, as lines in PEP 508; ``python`` is none of them."""
    found = []
    for name, given in table.items():
        for one in given if isinstance(given, list) else [given]:
            value = one if isinstance(one, Mapping) else {"version": one}
            pythons = poetry_ranges(str(value.get("python", "")))
            fits = any(map(fits_python, pythons)) and holds(str(value.get("markers", "")), extra)
            is_here = fits and value.get("platform", sys.platform) == sys.platform
            is_left_out = canonicalize_name(name) == "python" or (value.get("optional") and not with_optional)
            if is_here and not is_left_out:
                extras, address = value.get("extras"), table_address(value)
                asked = f"{name}[{','.join(map(str, extras))}]" if isinstance(extras, list) else name
                version = poetry_ranges(str(value.get("version", "")))[-1]
                found.append(f"{asked} @ {address}" if address else f"{asked}{version}")
    return found


def fits_python(versions: SpecifierSet | str) -> bool:
    """Whether a range of Pythons has the one that runs; one that cannot be read has."""
    try:
        return SpecifierSet(str(versions)).contains(platform.python_version(), prereleases=True)
    except ValueError:
        return True


def poetry_ranges(text: str) -> list[SpecifierSet]:
    """The alternatives (``||``) of Poetry's range, each as a set of bounds, its upper one kept: ``^1.2`` is ``>=1.2,<2``.

    A set of bounds has no "or", so of a dependency the last one is asked for. Nothing for what cannot be read.
    """
    return [_bounds(part) for part in re.split(r"\|\|?", text)]


def _bounds(text: str) -> SpecifierSet:
    """One alternative of a range."""
    bounds: list[str] = []
    try:
        for operator, version in re.findall(r"([\^~<>=!]*)\s*v?(\d[\w.*+!-]*)", text):
            lowest = version.removesuffix(".*")
            release = Version(lowest).release
            if operator in ("^", "^="):
                place = next((at for at, number in enumerate(release) if number), len(release) - 1)
            elif operator == "~":
                place = min(1, len(release) - 1)
            elif operator in ("", "=", "==") and lowest != version:
                place = len(release) - 1
            else:
                bounds.append(f"{'==' if operator in ('', '=') else operator}{version}")
                continue
            # The version after all that are equal up to that place: of 1.2.3 and place 1 it is 1.3.
            above = ".".join(map(str, (*release[:place], release[place] + 1)))
            bounds += [f">={lowest}", f"<{above}"]
        return SpecifierSet(",".join(bounds))
    except ValueError:  # no version, or one of thousands of digits
        return SpecifierSet()
