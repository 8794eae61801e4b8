"""One Python file, read without running it: what it defines, imports, exports and uses."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from composer_replication.tasks.intake.tree_rules import below_root, is_test_path
from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import UNPARSABLE, Definition, Function, parse_syntax

ImportStatement = ast.Import | ast.ImportFrom
Items = ast.List | ast.Tuple | ast.Set

_FLAT_ROOTS = ("src", "lib", "python")


@dataclass(frozen=True, slots=True)
class ImportedName:
    """One name of one import statement.

    ``target`` is the absolute dotted module; ``name`` is what is taken from it (``*`` for a star, None for ``import
    target``); ``bound`` is the name that it gets here.
    """

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


class Use(NamedTuple):
    """One occurrence of an identifier: as a plain name, else as an attribute.

    ``unit`` is the top-level definition that holds it (``function``, ``Class``, ``Class.method``, a constant), if any.
    """

    is_name: bool
    unit: str


class _Scope(NamedTuple):
    """Where a visitor is. ``owner`` is the class whose body it is, empty for the module's; None further inside."""

    owner: str | None = ""
    unit: str = ""


class SourceFile(ast.NodeVisitor):
    """What a parsed file says; as a visitor it reads its own tree.

    ``definitions`` are functions, classes and, as ``Class.method``, methods; each maps to all its parts: overloads,
    both arms of a condition, setters. ``bindings`` count what else binds a name at module level, imports aside;
    ``assignments`` are the last ``NAME = …`` directly in the module. ``exports`` are the literal lists that make up
    ``__all__``, ``exported`` all strings in it.
    """

    def __init__(self, path: str, text: str, tree: ast.Module, module: str) -> None:
        self.path, self.text, self.tree, self.module = path, text, tree, module
        self.lines = Lines(text)
        self.is_package = PurePosixPath(path).stem == "__init__"
        self.is_test = is_test_path(path)
        self.definitions: dict[str, list[Definition]] = {}
        self.imports: list[ImportedName] = []
        self.uses: dict[str, list[Use]] = defaultdict(list)
        self.bindings = Counter[str]()
        self.assignments: dict[str, ast.stmt] = {}
        self.exports: list[Items] = []
        self.exported = set[str]()
        self._scope = _Scope()
        for statement in tree.body:
            unit = ""
            match statement:
                case ast.Assign(targets=[target]) | ast.AnnAssign(target=target, value=ast.expr()):
                    unit = target.id if isinstance(target, ast.Name) else ""
            if unit:
                self.assignments[unit] = statement
            self._visit_all([statement], unit=unit)

    @cached_property
    def bound(self) -> frozenset[str]:
        """Every name to which the module itself gives a meaning at module level; methods too, as ``Class.method``."""
        imported = (found.bound for found in self.imports if found.is_module_level)
        return frozenset({*self.definitions, *self.bindings, *imported})

    def constant(self, name: str) -> ast.stmt | None:
        """The assignment of a module-level name that is bound nowhere else in the module."""
        is_single = self.bindings[name] == 1 and name not in self.definitions
        is_dunder = name.startswith("__") and name.endswith("__")
        return self.assignments.get(name) if is_single and not is_dunder else None

    # --- What is noted of each kind of syntax.

    def _visit_all(self, nodes: Iterable[ast.AST], **changes: Any) -> None:
        """Visit some nodes in a scope with these changes."""
        before = self._scope
        self._scope = before._replace(**changes)
        for node in nodes:
            self.visit(node)
        self._scope = before

    def _visit_function(self, node: Function) -> None:
        owner, unit = self._scope
        if owner is not None:
            unit = _dotted(owner, node.name)
            self.definitions.setdefault(unit, []).append(node)
        self._visit_all(ast.iter_child_nodes(node), unit=unit, owner=None)

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        owner, unit = self._scope
        if owner == "":
            unit = node.name
            self.definitions.setdefault(unit, []).append(node)
        inside = None if owner is None else _dotted(owner, node.name)
        self._visit_all(ast.iter_child_nodes(node), unit=unit, owner=inside)

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if self._scope.owner == "" and "__all__" in names and node.value is not None:
            self.exports += [node.value] if isinstance(node.value, Items) else []
            values = (getattr(each, "value", None) for each in ast.walk(node.value))
            self.exported.update(value for value in values if isinstance(value, str))
        self.generic_visit(node)

    visit_Assign = visit_AnnAssign = visit_AugAssign = _visit_assignment

    def _visit_import(self, node: ImportStatement) -> None:
        is_top = self._scope.owner == ""
        for index, alias in enumerate(node.names):
            target = self._absolute_target(node) if isinstance(node, ast.ImportFrom) else alias.name
            name = alias.name if isinstance(node, ast.ImportFrom) else None
            bound = alias.asname or name or alias.name.partition(".")[0]
            self.imports.append(ImportedName(target, name, bound, node, index, is_top))

    visit_Import = visit_ImportFrom = _visit_import

    def _absolute_target(self, statement: ast.ImportFrom) -> str:
        """The module that ``from … import`` names, with its dots resolved."""
        if not statement.level:
            return statement.module or ""
        parts = self.module.split(".")
        parts = parts[: len(parts) - statement.level + self.is_package]
        return ".".join(filter(None, [*parts, statement.module]))

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Store):
            self.uses[node.id].append(Use(True, self._scope.unit))
        elif self._scope.owner == "":
            self.bindings[node.id] += 1

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.uses[node.attr].append(Use(False, self._scope.unit))
        self.visit(node.value)


def read_source(path: str, content: bytes, roots: Iterable[str] = ()) -> SourceFile | None:
    """Read a ``.py`` file; None when it does not parse, is not UTF-8 or starts with a BOM."""
    try:
        text = content.decode()
        return SourceFile(path, text, parse_syntax(text), module_name(path, roots))
    except UNPARSABLE:  # or it is too deep for a visitor
        return None


def module_name(path: str, roots: Iterable[str] = ()) -> str:
    """The dotted name of a file: ``src/a/b.py`` and ``a/b.py`` are ``a.b``; ``roots`` are more places of import."""
    parts = PurePosixPath(below_root(path, (*roots, *_FLAT_ROOTS))).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def arguments_of(function: Function) -> list[ast.arg]:
    """All parameters of a function."""
    return [node for node in ast.iter_child_nodes(function.args) if isinstance(node, ast.arg)]


def _dotted(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name
