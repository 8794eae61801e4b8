"""What a ``setup.py`` hands to ``setup``, from its syntax tree; it is never run.

Names, literals, sums of lists, f-strings and dictionaries are followed. What is read from a file
(``open("requirements.txt")``, ``parse_requirements(…)``) becomes the line ``-r requirements.txt``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from composer_replication.tasks.syntax_trees import parse_syntax

UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""What the parser raises for a source that it cannot take: broken, too deep, or not a literal."""
_MAX_DEPTH = 12


def setup_arguments(data: bytes, text_files: Collection[str]) -> dict[str, Any]:
    """The arguments of ``setup`` as far as they can be read: strings, lists of strings, dictionaries.

    Args:
        data: the file.
        text_files: paths of the texts beside it, which it may read requirements from.
    """
    try:
        tree = parse_syntax(data)
        return _Reader(tree, text_files).arguments(tree)
    except UNREADABLE:
        return {}


class _Reader:
    """Values of expressions; None is what only running would tell."""

    def __init__(self, tree: ast.Module, text_files: Collection[str]) -> None:
        self._text_files = text_files
        self._assigned: dict[str, ast.expr] = {}
        self._keys: dict[str, dict[Any, ast.expr]] = {}
        self._functions: dict[str, ast.AST] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                self._functions.setdefault(node.name, node)
            elif isinstance(node, ast.With):
                for item in node.items:
                    if isinstance(item.optional_vars, ast.Name):
                        self._assigned[item.optional_vars.id] = item.context_expr
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self._assigned[node.target.id] = node.value
            elif isinstance(node, ast.Assign):
                self._assign(node.targets[0], node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._assigned[target.id] = value
        elif (
            isinstance(target, ast.Subscript)
            and isinstance(target.value, ast.Name)
            and isinstance(target.slice, ast.Constant)
        ):
            self._keys.setdefault(target.value.id, {})[target.slice.value] = value

    def arguments(self, tree: ast.Module) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _called(call) == "setup":
                for keyword in call.keywords:
                    value = self.value(keyword.value)
                    if keyword.arg is not None:
                        found[keyword.arg] = value
                    elif isinstance(value, dict):
                        found |= value
        return {name: value for name, value in found.items() if value is not None}

    def value(self, node: ast.expr | None, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH or node is None:
            return None
        readers: dict[type[ast.expr], Callable[[Any, int], Any]] = {
            ast.Constant: lambda one, _: one.value,
            ast.List: lambda one, inner: list(self._items(one.elts, inner)),
            ast.Tuple: lambda one, inner: list(self._items(one.elts, inner)),
            ast.Set: lambda one, inner: list(self._items(one.elts, inner)),
            ast.Dict: self._table,
            ast.Name: lambda one, inner: self._named(one.id, inner),
            ast.JoinedStr: self._text,
            ast.FormattedValue: lambda one, inner: self.value(one.value, inner + 1),
            ast.BinOp: self._sum,
            ast.Subscript: self._item,
            ast.Call: self._call,
        }
        return readers.get(type(node), self._lines_of)(node, depth)

    def _text(self, node: ast.JoinedStr, depth: int) -> str | None:
        parts = [self.value(part, depth + 1) for part in node.values]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None

    def _item(self, node: ast.Subscript, depth: int) -> Any:
        table, key = self.value(node.value, depth + 1), self.value(node.slice, depth + 1)
        return table.get(key) if isinstance(table, dict) and isinstance(key, str) else None

    def _items(self, nodes: list[ast.expr], depth: int) -> Iterator[Any]:
        for node in nodes:
            inner = node.value if isinstance(node, ast.Starred) else node
            value = self.value(inner, depth + 1)
            if isinstance(node, ast.Starred) and isinstance(value, list):
                yield from value
            elif value is not None:
                yield value

    def _table(self, node: ast.Dict, depth: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value, depth + 1)
            name = self.value(key, depth + 1)
            if key is None and isinstance(inner, dict):
                found |= inner
            elif isinstance(name, str) and inner is not None:
                found[name] = inner
        return found

    def _named(self, name: str, depth: int) -> Any:
        value = self.value(self._assigned.get(name), depth + 1)
        for key, inner in self._keys.get(name, {}).items() if isinstance(value, dict) else ():
            value.setdefault(key, self.value(inner, depth + 1))
        return value

    def _sum(self, node: ast.BinOp, depth: int) -> Any:
        if not isinstance(node.op, ast.Add):
            return None
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        if isinstance(left, list) or isinstance(
            right, list
        ):  # what is known of a list is better than nothing
            return [
                *(left if isinstance(left, list) else []),
                *(right if isinstance(right, list) else []),
            ]
        return left + right if isinstance(left, str) and isinstance(right, str) else None

    def _call(self, node: ast.Call, depth: int) -> Any:
        name = _called(node)
        words = {word.arg: self.value(word.value, depth + 1) for word in node.keywords if word.arg}
        first = self.value(node.args[0], depth + 1) if node.args else None
        if name == "dict" and not node.args:
            return {key: value for key, value in words.items() if value is not None}
        if name in ("find_packages", "find_namespace_packages", "PEP420PackageFinder"):
            where = first or words.get("where")
            return {"where": where} if isinstance(where, str) else None
        if name in ("list", "tuple", "sorted", "set") and isinstance(first, list):
            return first
        if name in ("split", "splitlines", "strip") and isinstance(node.func, ast.Attribute):
            text = self.value(node.func.value, depth + 1)
            if isinstance(text, str):
                return text.strip() if name == "strip" else text.splitlines() if node.args else text.split()
            if isinstance(text, list):
                return text
        return self._lines_of(node, depth)

    def _lines_of(self, node: ast.expr, depth: int) -> list[str] | None:
        """The lines of the files that an expression seems to read, as ``-r`` each."""
        if depth > _MAX_DEPTH:
            return None
        words = self._words(node, set())
        named = [path for path in sorted(self._text_files) if _is_named(path, words)]
        return [f"-r {path}" for path in named] or None

    def _words(self, node: ast.AST, seen: set[str]) -> frozenset[str]:
        """The strings of an expression; those of the names and functions in it where it has no path itself."""
        own = {
            part.value
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        if any(word.endswith((".txt", ".in")) for word in own):
            return frozenset(own)
        for part in ast.walk(node):
            name = part.id if isinstance(part, ast.Name) else ""
            for inner in (self._assigned.get(name), self._functions.get(name)):
                if inner is not None and name not in seen:
                    own |= self._words(inner, seen | {name})
        return frozenset(own)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_named(path: str, words: Collection[str]) -> bool:
    """Whether strings of the code lead to a file: its path, or the parts of it (``join(here, "reqs", "base.txt")``)."""
    parts = PurePosixPath(path).parts
    return any(word.removeprefix("./") == path or word.endswith(f"/{path}") for word in words) or all(
        part in words for part in parts
    )


def literal_in(data: bytes, name: str) -> str:
    """The string that a module gives to a name by ``NAME = "…"``; empty where there is none."""
    try:
        tree = parse_syntax(data)
    except UNREADABLE:
        return ""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(getattr(node, "value", None), "value", None)
        if isinstance(value, str) and any(getattr(target, "id", "") == name for target in targets):
            return value
    return ""


def setup_keywords(data: bytes) -> Mapping[str, ast.expr]:
    """The keywords of all calls, by name: which of them a ``setup.py`` has at all."""
    try:
        tree = parse_syntax(data)
    except UNREADABLE:
        return {}
    return {node.arg: node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
