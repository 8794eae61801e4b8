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
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from composer_replication.tasks.intake.requirement_texts import read_file, read_lines
from composer_replication.tasks.syntax_trees import parsed

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TEXT_SUFFIXES = (".txt", ".in")
_MAX_DEPTH = 12


def parse_toml(data: bytes) -> dict[str, Any]:
    """A TOML file as a table; empty when broken."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return {}


def parse_ini(data: bytes) -> configparser.ConfigParser:
    """A file of sections; empty when broken."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(data.decode("utf-8", "replace"))
    except configparser.Error:
        return configparser.ConfigParser(interpolation=None)
    return parser


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
    def config(self) -> configparser.ConfigParser:
        return parse_ini(self.read(self.path("setup.cfg")))

    @cached_property
    def setup(self) -> dict[str, Any]:
        beside = [
            path.removeprefix(self.start)
            for path in self.files
            if path.startswith(self.start) and path.endswith(TEXT_SUFFIXES)
        ]
        return setup_arguments(self.read(self.path("setup.py")), beside)

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

    def ini(self, section: str, key: str) -> str:
        """A value of ``setup.cfg``; either spelling of the key is read."""
        found = (self.config.get(section, one, fallback="") for one in (key, key.replace("_", "-")))
        return next(filter(None, found), "")

    @property
    def backend(self) -> str:
        return str(self.table("build-system").get("build-backend", ""))

    def lines(self, value: object) -> list[Requirement]:
        """Requirements that stand in a list of strings."""
        return read_lines(texts(value), self.folder, self.read, self.folder)

    def named(self, value: object) -> list[Requirement]:
        """Requirements of the files that a value names: one, a list, or a table with ``file``."""
        inner = value.get("file") if isinstance(value, Mapping) else value
        return [one for path in texts(inner) for one in read_file(self.path(path), self.read, self.folder)]

    def ini_lines(self, value: str) -> list[Requirement]:
        """Requirements of a value of ``setup.cfg``, which may begin with ``file:``."""
        value = value.strip()
        if value.startswith("file:"):
            return self.named([path.strip() for path in value[5:].replace("\n", ",").split(",")])
        return self.lines(value.splitlines())


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
                case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
                    self._values[name] = value
                case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                    self._values[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self._values[name] = value
                case ast.Assign(targets=[ast.Subscript(ast.Name(id=name), ast.Constant(value=str() as key))]):
                    self._keys.setdefault(name, {})[key] = node.value

    def value(self, node: ast.AST | None, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH or node is None:
            return None
        readers: dict[type[ast.AST], Callable[[Any, int], Any]] = {
            ast.Constant: lambda one, _: one.value,
            ast.List: self._list,
            ast.Tuple: self._list,
            ast.Set: self._list,
            ast.Dict: self._table,
            ast.Name: self._named,
            ast.JoinedStr: self._text,
            ast.FormattedValue: lambda one, inner: self.value(one.value, inner),
            ast.BinOp: self._sum,
            ast.Subscript: self._item,
            ast.Call: self._call,
        }
        return readers.get(type(node), self._lines_of)(node, depth + 1)

    def _text(self, node: ast.JoinedStr, depth: int) -> str | None:
        parts = [self.value(part, depth) for part in node.values]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None

    def _item(self, node: ast.Subscript, depth: int) -> Any:
        table, key = self.value(node.value, depth), self.value(node.slice, depth)
        return table.get(key) if isinstance(table, dict) and isinstance(key, str) else None

    def _list(self, node: ast.List, depth: int) -> list[Any]:
        found: list[Any] = []
        for one in node.elts:
            is_many = isinstance(one, ast.Starred)
            value = self.value(one.value if isinstance(one, ast.Starred) else one, depth)
            found += value if is_many and isinstance(value, list) else [value] if not is_many else []
        return [value for value in found if value is not None]

    def _table(self, node: ast.Dict, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            name, inner = self.value(key, depth), self.value(value, depth)
            if key is None and isinstance(inner, dict):
                found |= inner
            elif isinstance(name, str) and inner is not None:
                found[name] = inner
        return found

    def _named(self, node: ast.Name, depth: int) -> Any:
        value = self.value(self._values.get(node.id), depth)
        if isinstance(value, dict):
            later = {key: self.value(inner, depth) for key, inner in self._keys.get(node.id, {}).items()}
            value = later | value
        return value

    def _sum(self, node: ast.BinOp, depth: int) -> Any:
        sides = self.value(node.left, depth), self.value(node.right, depth)
        lists = [side for side in sides if isinstance(side, list)]
        if not isinstance(node.op, ast.Add):
            return None
        if lists:  # what is known of a list is better than nothing
            return [item for part in lists for item in part]
        return "".join(sides) if all(isinstance(side, str) for side in sides) else None

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = _called(node)
        words = {word.arg: self.value(word.value, depth) for word in node.keywords if word.arg}
        first = self.value(node.args[0], depth) if node.args else None
        if name == "dict" and not node.args:
            return {key: value for key, value in words.items() if value is not None}
        if name in ("find_packages", "find_namespace_packages"):
            where = first or words.get("where")
            return {"where": where} if isinstance(where, str) else None
        if name in ("list", "tuple", "sorted", "set") and isinstance(first, list):
            return first
        if name in ("split", "splitlines", "strip") and isinstance(node.func, ast.Attribute):
            text = self.value(node.func.value, depth)
            if isinstance(text, str):
                return text.strip() if name == "strip" else text.splitlines() if node.args else text.split()
            if isinstance(text, list):
                return text
        return self._lines_of(node, depth)

    def _lines_of(self, node: ast.AST, _: int) -> list[str] | None:
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
