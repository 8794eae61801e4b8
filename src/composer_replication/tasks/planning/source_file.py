"""One Python file, read without running it: what it defines, imports, exports and uses."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from composer_replication.tasks.intake.tree_rules import below_root, is_test_path
from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import (
    UNPARSABLE,
    Definition,
    definitions_in,
    first_line,
    parse_syntax,
)

ImportStatement = ast.Import | ast.ImportFrom
Items = ast.List | ast.Tuple | ast.Set

_FLAT_ROOTS = ("src", "lib", "python")


@dataclass(frozen=True, slots=True)
class ImportedName:
    """One name of one import statement of a file.

    ``target`` is the absolute dotted module; ``name`` is what is taken from it (``*`` for a star, None for ``import
    target``); ``bound`` is the name that it gets here.
    """

    file: SourceFile
    target: str
    name: str | None
    bound: str
    statement: ImportStatement
    index: int
    is_module_level: bool

    @property
    def is_plain(self) -> bool:
        """Whether it is an ``import a`` or ``import a.b``, which binds ``a``."""
        return self.name is None and self.statement.names[self.index].asname is None


class SourceFile:
    """What a parsed file says.

    ``definitions`` are functions, classes at the top and, as ``Class.method``, methods; each maps to all its parts:
    overloads, both arms of a condition, setters. ``uses`` are by identifier the definitions (``function``, ``Class``,
    ``Class.method``) where it occurs as a name or attribute, "" for the module itself. ``bound`` are all names that the
    module gives a meaning, methods too. ``exports`` are the literal lists that make up ``__all__``, ``exported`` all
    strings in it.
    """

    def __init__(self, path: str, text: str, tree: ast.Module, module: str) -> None:
        self.path, self.text, self.tree, self.module = path, text, tree, module
        self.lines = Lines(text)
        self.is_package = PurePosixPath(path).stem == "__init__"
        self.is_test = is_test_path(path)
        self.definitions: dict[str, list[Definition]] = defaultdict(list)
        self.imports: list[ImportedName] = []
        self.uses: dict[str, set[str]] = defaultdict(set)
        self.exports: list[Items] = []
        self.exported = set[str]()
        holders = [""] * (len(self.lines.starts) + 1)  # by line
        for name, node in definitions_in(tree.body):
            if "." not in name or not isinstance(node, ast.ClassDef):
                self.definitions[name].append(node)
                first, last = first_line(node), node.end_lineno or node.lineno
                holders[first : last + 1] = [name] * (last + 1 - first)
        self.bound = set(self.definitions)
        for part in ast.walk(tree):
            self._note(part, holders[getattr(part, "lineno", 0)])

    def _note(self, node: ast.AST, holder: str) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                found = list(self._imported(node, is_module_level=not holder))
                self.imports += found
                self.bound.update(one.bound for one in found if not holder)
            case ast.Name(id=name, ctx=ast.Store()):
                self.bound.update(() if holder else (name,))
            case ast.Name(id=name) | ast.Attribute(attr=name):
                self.uses[name].add(holder)
            case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.AugAssign(value=value) if value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if not holder and any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
                    self.exports += [value] if isinstance(value, Items) else []
                    values = (getattr(each, "value", None) for each in ast.walk(value))
                    self.exported.update(each for each in values if isinstance(each, str))

    def _imported(self, node: ImportStatement, *, is_module_level: bool) -> Iterator[ImportedName]:
        for index, alias in enumerate(node.names):
            target = self._absolute_target(node) if isinstance(node, ast.ImportFrom) else alias.name
            name = alias.name if isinstance(node, ast.ImportFrom) else None
            bound = alias.asname or name or alias.name.partition(".")[0]
            yield ImportedName(self, target, name, bound, node, index, is_module_level)

    def _absolute_target(self, statement: ast.ImportFrom) -> str:
        """The module that ``from … import`` names, with its dots resolved."""
        if not statement.level:
            return statement.module or ""
        parts = self.module.split(".")
        parts = parts[: len(parts) - statement.level + self.is_package]
        return ".".join(filter(None, [*parts, statement.module]))


def read_source(path: str, content: bytes, roots: Iterable[str] = ()) -> SourceFile | None:
    """Read a ``.py`` file; None when it does not parse, is not UTF-8 or starts with a BOM."""
    try:
        text = content.decode()
        return SourceFile(path, text, parse_syntax(text), module_name(path, roots))
    except UNPARSABLE:
        return None


def module_name(path: str, roots: Iterable[str] = ()) -> str:
    """The dotted name of a file: ``src/a/b.py`` and ``a/b.py`` are ``a.b``; ``roots`` are more places of import."""
    parts = PurePosixPath(below_root(path, (*roots, *_FLAT_ROOTS))).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")
