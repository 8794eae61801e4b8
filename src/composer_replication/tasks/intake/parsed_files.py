"""The files that declare a Python project, each parsed once; a broken one is as good as empty. None is run.

Of a ``setup.py`` the syntax tree is read: literals, names, sums and dictionaries are followed.
"""

from __future__ import annotations

import ast
import configparser
import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from functools import cached_property
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from composer_replication.tasks.intake.requirement_texts import (
    as_lines,
    holds,
    parsed,
    poetry_lines,
    poetry_range,
    requirement_of,
)
from composer_replication.tasks.syntax_trees import parsed as parse_file

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TEXT_SUFFIXES = (".txt", ".in")
_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")


def parse_toml(data: bytes) -> dict[str, Any]:
    """A TOML file as a table; empty when broken."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return {}


def parse_ini(text: str) -> dict[str, dict[str, str]]:
    """The sections of a file, each with its values; empty when broken."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    return {name: dict(section) for name, section in parser.items()}


def inner_table(table: object, *keys: str) -> dict[str, Any]:
    """The table at a path of keys; empty when absent, or when something else stands there."""
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}


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


class ProjectFiles:
    """The files of one project, each parsed once."""

    def __init__(self, files: Mapping[str, bytes], folder: str = "") -> None:
        self.files = files
        self.folder = folder
        self.start = f"{folder}/" if folder else ""

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.folder, name))

    def text(self, name: str) -> str:
        """A text by its path in the project."""
        return self.text_at(self.path(name))

    def text_at(self, path: str) -> str:
        """A text by its path from the top, without a byte order mark."""
        return self.files.get(path, b"").decode("utf-8-sig", "replace")

    @cached_property
    def toml(self) -> dict[str, Any]:
        return parse_toml(self.files.get(self.path("pyproject.toml"), b""))

    @cached_property
    def config(self) -> dict[str, dict[str, str]]:
        return parse_ini(self.text("setup.cfg"))

    @cached_property
    def setup(self) -> dict[str, Any]:
        return setup_arguments(self.text("setup.py"))

    @cached_property
    def declared(self) -> tuple[dict[str, Any], ...]:
        """What ``PKG-INFO``, ``pyproject.toml``, ``setup.cfg`` and ``setup.py`` say, each in tables as those of the second."""
        told: dict[str, Any] = {**self.config.get("metadata", {}), **self.config.get("options", {})}
        told = {key.replace("-", "_"): value for key, value in told.items()}
        for key in ("packages.find", "extras_require", "entry_points"):
            told[key.partition(".")[0]] = self.config.get(f"options.{key}")
        poetry = _of_poetry(inner_table(self.toml, "tool", "poetry"))
        said = _of_package_info(self.text("PKG-INFO"))
        return _as_tables(said), self.toml, *map(_as_tables, (poetry, told, self.setup))

    def table(self, *keys: str) -> dict[str, Any]:
        """A table of ``pyproject.toml``."""
        return inner_table(self.toml, *keys)

    def strings(self, *paths: str) -> list[str]:
        """The strings that are declared at some paths (``values_at``), in their order."""
        found = (value for path in paths for table in self.declared for value in values_at(table, path))
        return [text for value in found for text in texts(value) if text.strip()]

    def lines(
        self, value: object, folder: str | None = None, seen: frozenset[str] = frozenset()
    ) -> list[Requirement]:
        """Requirements of a list or a text, as pip reads its lines.

        Args:
            value: lines, or items that may be such lines.
            folder: where they stand: included files are relative to it; by default the project's, as all other paths.
            seen: files that are being read, so that two which include each other end.
        """
        found: list[Requirement] = []
        for kind, line in as_lines("\n".join(texts(value))):
            if kind == "r":
                path = posixpath.normpath(posixpath.join(self.folder if folder is None else folder, line))
                found += [] if path in seen else self.lines_of_file(path, seen)
            elif (requirement := requirement_of(line, self.folder, is_address=kind == "e")) is not None:
                found.append(requirement)
        return found

    def lines_of_file(self, path: str, seen: frozenset[str] = frozenset()) -> list[Requirement]:
        """The requirements of a file by its path from the top."""
        return self.lines(self.text_at(path), posixpath.dirname(path), seen | {path})


def _as_tables(said: Mapping[str, Any]) -> dict[str, Any]:
    """What is said by the keywords of setuptools, as tables of ``pyproject.toml``."""
    extras = {"tests-require": said.get("tests_require"), **inner_table(said.get("extras_require"))}
    folders, points = said.get("package_dir"), said.get("entry_points")
    if isinstance(folders, str):
        folders = dict(line.split("=", 1) for line in folders.splitlines() if "=" in line)
    return {
        "project": {
            **{key: said.get(key) for key in ("name", "version", "license", "classifiers")},
            "requires-python": said.get("python_requires"),
            "dependencies": _named(said.get("install_requires", said.get("requires"))),
            "optional-dependencies": {key: _named(value) for key, value in extras.items()},
            "entry-points": parse_ini(points) if isinstance(points, str) else points,
        },
        "tool": {"setuptools": {"package-dir": folders, "packages": {"find": said.get("packages")}}},
    }


def _of_package_info(text: str) -> dict[str, Any]:
    """The header of ``PKG-INFO``, what an archive of sources says of itself, by keyword. The description stays out."""
    header = Parser().parsestr(text, headersonly=True)
    said = {name: [str(value) for value in header.get_all(name, [])] for name in header}
    groups: dict[str, list[str]] = {"": []}
    for requirement in filter(None, map(parsed, said.get("Requires-Dist", []))):
        marker, requirement.marker = requirement.marker, None
        for extra in ("", *dict.fromkeys(_EXTRA.findall(str(marker or "")))):
            if holds(marker, extra):
                groups.setdefault(extra, []).append(str(requirement))
    return {
        "name": said.get("Name"),
        "version": said.get("Version"),
        "license": [*said.get("License-Expression", []), *said.get("License", [])],
        "classifiers": said.get("Classifier"),
        "python_requires": said.get("Requires-Python"),
        "install_requires": groups.pop(""),
        "extras_require": groups,
    }


def _of_poetry(poetry: Mapping[str, Any]) -> dict[str, Any]:
    """What Poetry's own tables say, by keyword: its groups are extras, too."""
    own = inner_table(poetry, "dependencies")
    groups = {"dev": inner_table(poetry, "dev-dependencies")}
    for name, group in inner_table(poetry, "group").items():
        groups[name] = inner_table(group, "dependencies")
    for extra, names in inner_table(poetry, "extras").items():
        wanted = set(map(canonicalize_name, texts(names)))
        of_extra = {name: given for name, given in own.items() if canonicalize_name(name) in wanted}
        groups[extra] = groups.get(extra, {}) | of_extra
    return {
        **{key: poetry.get(key) for key in ("name", "version", "license", "classifiers")},
        "python_requires": [str(poetry_range(text)) for text in texts(own.get("python"))],
        "install_requires": poetry_lines(own, with_optional=False),
        "extras_require": {name: poetry_lines(group) for name, group in groups.items()},
        "entry_points": {"console_scripts": poetry.get("scripts"), **inner_table(poetry, "plugins")},
    }


def _named(value: object) -> list[str]:
    """Lines; those of ``file: a.txt, b.txt`` are in the files that it names."""
    text = "\n".join(texts(value)).strip()
    names = text.removeprefix("file:").replace(",", " ").split()
    return [f"-r {name}" for name in names] if text.startswith("file:") else [text]


# --- What a setup.py hands to setup.


def setup_arguments(text: str) -> dict[str, Any]:
    """The arguments of ``setup``: strings, lists of strings, tables of these; None where only running would tell."""
    tree = parse_file(text)
    found: dict[str, Any] = {}
    if tree is None:
        return found
    try:
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _called(call) == "setup":
                found |= _Values(tree).table((word.arg, word.value) for word in call.keywords)
    except RecursionError:  # a sum of thousands
        return {}
    return found


class _Values:
    """What the expressions of a module come to. Names are followed to what they were given anywhere in it."""

    def __init__(self, tree: ast.AST) -> None:
        self._given: dict[str, ast.expr] = {}
        self._keys: dict[str, list[tuple[str, ast.expr]]] = {}
        self._known: dict[str, Any] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                    self._given[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._given[name] = value
                case ast.Assign(targets=[ast.Subscript(ast.Name(id=name), ast.Constant(value=str() as key))]):
                    self._keys.setdefault(name, []).append((key, node.value))

    def table(self, items: Iterable[tuple[str | None, ast.expr]]) -> dict[str, Any]:
        """Keys with their values; what stands without a key is a table itself (``**more``)."""
        found: dict[str, Any] = {}
        for key, node in items:
            value = self.value(node)
            found |= inner_table(value) if key is None else {key: value}
        return found

    def value(self, node: ast.expr) -> Any:
        """A string, the strings of a list, or a table of these; None is what only running would tell."""
        found: Any = None
        match node:
            case ast.Constant(value=str() as text):
                found = text
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                found = [text for part in parts for text in texts(self.value(part))]
            case ast.Starred(value=part):
                found = self.value(part)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                found = _sum(self.value(left), self.value(right))
            case ast.Dict(keys=keys, values=values):
                names = [None if key is None else self.value(key) for key in keys]
                items = zip(names, values, keys, strict=True)
                found = self.table(
                    (name, one) for name, one, key in items if key is None or isinstance(name, str)
                )
            case ast.Subscript(value=table, slice=ast.Constant(value=str() as key)):
                found = inner_table(self.value(table)).get(key)
            case ast.Name(id=name) if name in self._given:
                found = self._follow(name)
            case ast.Call(func=ast.Name(id="dict"), keywords=words):
                found = self.table((word.arg, word.value) for word in words)
            case ast.Call(args=args, keywords=words) if _called(node) in (
                "find_packages",
                "find_namespace_packages",
            ):
                where = [*args, *(word.value for word in words if word.arg == "where")]
                found = {"where": self.value(where[0])} if where else None
        return found

    def _follow(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = None  # for one that is given in terms of itself
            self._known[name] = table = self.value(self._given[name])
            for key, node in self._keys.get(name, ()) if isinstance(table, dict) else ():
                table.setdefault(key, self.value(node))  # what is put into it later, perhaps of its own parts
        return self._known[name]


def _sum(*sides: Any) -> Any:
    """Two texts in one; of two lists what is known of either, which is better than nothing."""
    if any(isinstance(side, list) for side in sides):
        return [text for side in sides if isinstance(side, list) for text in side]
    return "".join(sides) if all(isinstance(side, str) for side in sides) else None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
