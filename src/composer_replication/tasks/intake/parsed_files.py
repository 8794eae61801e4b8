"""The files that declare a Python project, each parsed once; a broken one is as good as empty. None is run.

Of a ``setup.py`` the syntax tree is read: names, literals, sums of lists, f-strings and dictionaries are followed.
What it reads from a file (``open("requirements.txt")``, ``parse_requirements(…)``) becomes ``-r requirements.txt``.
"""

from __future__ import annotations

import ast
import configparser
import posixpath
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from email.parser import Parser
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from composer_replication.tasks.intake.requirement_texts import as_lines, holds, requirement_of
from composer_replication.tasks.syntax_trees import parsed

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TEXT_SUFFIXES = (".txt", ".in")
FIELDS = {
    "name": ("Name", "name", "project.name", "tool.poetry.name"),
    "version": ("Version", "version", "project.version", "tool.poetry.version"),
    "python": ("Requires-Python", "python_requires", "project.requires-python"),
    "licence": ("License", "license", "project.license", "project.license.text", "tool.poetry.license"),
    "classifiers": ("Classifier", "classifiers", "project.classifiers", "tool.poetry.classifiers"),
}
"""Where each stands: the header of ``PKG-INFO``, the keyword of setuptools, then the paths of ``pyproject.toml``."""
_MAX_DEPTH = 12


def parse_toml(data: bytes) -> dict[str, Any]:
    """A TOML file as a table; empty when broken."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return {}


def parse_ini(data: bytes) -> dict[str, dict[str, str]]:
    """The sections of a file, each with its values; empty when broken."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(data.decode("utf-8", "replace"))
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

    def read(self, path: str) -> bytes:
        """A file by its path from the top."""
        return self.files.get(path, b"")

    def text(self, name: str) -> str:
        """A text by its path in the project."""
        return self.read(self.path(name)).decode("utf-8", "replace")

    @cached_property
    def toml(self) -> dict[str, Any]:
        return parse_toml(self.read(self.path("pyproject.toml")))

    @cached_property
    def config(self) -> dict[str, dict[str, str]]:
        return parse_ini(self.read(self.path("setup.cfg")))

    @cached_property
    def setup(self) -> dict[str, Any]:
        own = (path.removeprefix(self.start) for path in self.files if path.startswith(self.start))
        beside = [path for path in own if path.endswith(TEXT_SUFFIXES)]
        return setup_arguments(self.read(self.path("setup.py")), beside)

    @cached_property
    def told(self) -> tuple[dict[str, Any], ...]:
        """What setuptools is told: by ``setup.cfg``, as if its values were arguments, and by ``setup.py``."""
        plain = self.config.get("metadata", {}) | self.config.get("options", {})
        of_sections = {
            "packages": "options.packages.find",
            "extras_require": "options.extras_require",
            "entry_points": "options.entry_points",
        }
        tables = {key: self.config[name] for key, name in of_sections.items() if name in self.config}
        return {key.replace("-", "_"): value for key, value in plain.items()} | tables, self.setup

    @cached_property
    def info(self) -> Mapping[str, list[str]]:
        """The header of ``PKG-INFO``: what an archive of sources says of itself. The description stays out."""
        header = Parser().parsestr(self.text("PKG-INFO"), headersonly=True)
        return {name: [str(value) for value in header.get_all(name, [])] for name in header}

    def table(self, *keys: str) -> dict[str, Any]:
        return inner_table(self.toml, *keys)

    def strings(self, *paths: str) -> list[str]:
        """The strings of ``pyproject.toml`` at some paths (``values_at``), in their order."""
        return [text for path in paths for value in values_at(self.toml, path) for text in texts(value)]

    def said(self, field: str) -> list[str]:
        """All that the files say of one of ``FIELDS``: ``PKG-INFO``, ``pyproject.toml``, ``setup.cfg``, ``setup.py``."""
        header, keyword, *paths = FIELDS[field]
        of_setuptools = [text for told in self.told for text in texts(told.get(keyword))]
        return [
            text
            for text in (*self.info.get(header, []), *self.strings(*paths), *of_setuptools)
            if text.strip()
        ]

    @property
    def backend(self) -> str:
        return str(self.table("build-system").get("build-backend", ""))

    def lines(
        self, value: object, folder: str | None = None, seen: frozenset[str] = frozenset()
    ) -> list[Requirement]:
        """Requirements of a list or a text, as pip reads its lines; in ``setup.cfg`` one may begin with ``file:``.

        Args:
            value: lines, or items that may be such lines.
            folder: where they stand: included files are relative to it; by default the project's, as all other paths.
            seen: files that are being read, so that two which include each other end.
        """
        if isinstance(value, str) and value.strip().startswith("file:"):
            return self.named(value.strip()[5:].replace("\n", ",").split(","))
        found: list[Requirement] = []
        bounds: dict[str, Requirement] = {}
        for kind, line in as_lines("\n".join(texts(value))):
            if kind in ("r", "c"):
                path = posixpath.normpath(posixpath.join(self.folder if folder is None else folder, line))
                inner = [] if path in seen else self.lines_of_file(path, seen)
                if kind == "r":
                    found += inner
                else:
                    bounds |= {canonicalize_name(one.name): one for one in inner}
            elif (requirement := requirement_of(line, self.folder, is_address=kind == "e")) is not None:
                found.append(requirement)
        for requirement in found:
            bound = bounds.get(canonicalize_name(requirement.name))
            if bound is not None and bound.url is None and holds(bound):
                requirement.specifier &= bound.specifier
        return found

    def lines_of_file(self, path: str, seen: frozenset[str] = frozenset()) -> list[Requirement]:
        """The requirements of a file by its path from the top."""
        text = self.read(path).decode("utf-8", "replace").removeprefix("\ufeff")
        return self.lines([text], posixpath.dirname(path), seen | {path})

    def named(self, value: object) -> list[Requirement]:
        """Requirements of the files that a value names: one, a list, or a table with ``file``."""
        names = texts(value.get("file") if isinstance(value, Mapping) else value)
        return [one for name in names for one in self.lines_of_file(self.path(name.strip()))]


# --- What a setup.py hands to setup.


def setup_arguments(data: bytes, text_files: Collection[str]) -> dict[str, Any]:
    """The arguments of ``setup`` as far as they can be read: strings, lists of strings, dictionaries.

    ``text_files`` are the paths of the texts beside it, which it may read requirements from.
    """
    tree = parsed(data)
    if tree is None:
        return {}
    found: dict[str, Any] = {}
    try:
        reader = _Reader(tree, text_files)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _called(call) == "setup":
                for keyword in call.keywords:
                    value = reader.value(keyword.value)
                    if keyword.arg is not None:
                        found[keyword.arg] = value
                    elif isinstance(value, dict):
                        found |= value
    except (RecursionError, ValueError, TypeError, MemoryError):  # what only running would tell
        return {}
    return {name: value for name, value in found.items() if value is not None}


class _Reader:
    """Values of expressions; None is what only running would tell."""

    def __init__(self, tree: ast.Module, text_files: Collection[str]) -> None:
        self._text_files = text_files
        self._values: dict[str, ast.AST] = {}
        self._keys: dict[str, dict[Any, ast.AST]] = {}
        self._functions: dict[str, ast.AST] = {}
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name):
                    self._functions.setdefault(name, node)
                case (
                    ast.withitem(context_expr=value, optional_vars=ast.Name(id=name))
                    | ast.Assign(targets=[ast.Name(id=name), *_], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ):
                    self._values[name] = value
                case ast.Assign(targets=[ast.Subscript(ast.Name(id=name), ast.Constant(value=str() as key))]):
                    self._keys.setdefault(name, {})[key] = node.value

    def value(self, node: ast.AST | None, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH or node is None:
            return None
        inner = partial(self.value, depth=depth + 1)
        found: Any
        match node:
            case ast.Constant(value=value):
                found = value
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                lists = [
                    inner(part.value) if isinstance(part, ast.Starred) else [inner(part)] for part in parts
                ]
                found = [item for item in _flat(lists) if item is not None]
            case ast.Dict():
                found = self._table(node, inner)
            case ast.Name(id=name):
                found = inner(self._values.get(name))
                if isinstance(found, dict):  # what is put into it later counts, too
                    found = {key: inner(one) for key, one in self._keys.get(name, {}).items()} | found
            case ast.BinOp():
                found = _sum(inner(node.left), inner(node.right)) if isinstance(node.op, ast.Add) else None
            case ast.JoinedStr(values=parts):
                found = _sum("", *map(inner, parts))
            case ast.FormattedValue(value=part):
                found = inner(part)
            case ast.Subscript(value=table, slice=key):
                whole, name = inner(table), inner(key)
                found = whole.get(name) if isinstance(whole, dict) and isinstance(name, str) else None
            case ast.Call():
                found = self._result(node, depth + 1)
            case _:
                found = self._lines_of(node)
        return found

    def _table(self, node: ast.Dict, inner: Callable[[ast.AST | None], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, name, value in zip(node.keys, map(inner, node.keys), map(inner, node.values), strict=True):
            if key is None and isinstance(value, dict):
                found |= value
            elif isinstance(name, str) and value is not None:
                found[name] = value
        return found

    def _result(self, call: ast.Call, depth: int) -> Any:
        name = _called(call)
        words = {word.arg: self.value(word.value, depth) for word in call.keywords if word.arg}
        first = self.value(call.args[0], depth) if call.args else None
        if name == "dict" and not call.args:
            return {key: value for key, value in words.items() if value is not None}
        if name in ("find_packages", "find_namespace_packages"):
            where = first or words.get("where")
            return {"where": where} if isinstance(where, str) else None
        if name in ("list", "tuple", "sorted", "set") and isinstance(first, list):
            return first
        if name in ("split", "splitlines", "strip") and isinstance(call.func, ast.Attribute):
            text = self.value(call.func.value, depth)
            if isinstance(text, str):
                return text.strip() if name == "strip" else text.splitlines() if call.args else text.split()
            if isinstance(text, list):
                return text
        return self._lines_of(call)

    def _lines_of(self, node: ast.AST) -> list[str] | None:
        """The lines of the files that an expression seems to read, as ``-r`` each."""
        words = self._words(node, frozenset())
        return [f"-r {path}" for path in sorted(self._text_files) if _is_named(path, words)] or None

    def _words(self, node: ast.AST, seen: frozenset[str]) -> frozenset[str]:
        """The strings of an expression; those of the names and functions in it where it has no path itself."""
        parts = list(ast.walk(node))
        own = {one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        if any(word.endswith(TEXT_SUFFIXES) for word in own):
            return frozenset(own)
        for name in {part.id for part in parts if isinstance(part, ast.Name)} - seen:
            for inner in filter(None, (self._values.get(name), self._functions.get(name))):
                own |= self._words(inner, seen | {name})
        return frozenset(own)


def _flat(parts: Iterable[Any]) -> list[Any]:
    return [item for part in parts if isinstance(part, list) for item in part]


def _sum(*sides: Any) -> Any:
    """Two texts in one; of two lists what is known of either, which is better than nothing."""
    if any(isinstance(side, list) for side in sides):
        return _flat(sides)
    return "".join(sides) if all(isinstance(side, str) for side in sides) else None


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_named(path: str, words: Collection[str]) -> bool:
    """Whether strings of the code lead to a file: its path, or the parts of it (``join(here, "reqs", "base.txt")``)."""
    is_whole = any(word.removeprefix("./") == path or word.endswith(f"/{path}") for word in words)
    return is_whole or all(part in words for part in PurePosixPath(path).parts)


def literal_in(data: bytes, names: Iterable[str]) -> str:
    """The string that a module gives to the first of some names by ``NAME = "…"``; empty where there is none."""
    tree = parsed(data)
    found: dict[str, str] = {}
    for node in [] if tree is None else tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(getattr(node, "value", None), "value", None)
        if isinstance(value, str):
            found = {getattr(target, "id", ""): value for target in targets} | found
    return next((found[name] for name in names if name in found), "")


def setup_keywords(data: bytes) -> frozenset[str]:
    """The names of all keywords of all calls: which of them a ``setup.py`` has at all."""
    tree = parsed(data)
    nodes = [] if tree is None else list(ast.walk(tree))
    return frozenset(node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg)
