"""One Python file, read without running it: what it defines, imports, exports and uses, and when.

*Import time* is what runs when the module is imported: module level, class bodies,
decorators, default arguments, base classes, annotations that are evaluated. Everything else
is *call time*: function bodies, ``if TYPE_CHECKING``, ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

from composer_replication.tasks.intake.source_folders import below_root
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import first_line

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Items = ast.List | ast.Tuple | ast.Set

_FLAT_ROOTS = ("src", "lib", "python")


@dataclass(frozen=True, slots=True)
class ImportedName:
    """One name of one import statement.

    ``target`` is the absolute dotted module; ``name`` is what is taken from it (``*`` for a
    star, None for ``import target``); ``bound`` is the name that it gets here.
    """

    target: str
    name: str | None
    bound: str
    statement: ast.Import | ast.ImportFrom
    index: int
    is_module_level: bool


@dataclass(frozen=True, slots=True)
class Use:
    """One occurrence of an identifier. ``chain`` is the dotted text before an attribute, if it is plain.

    ``kind`` is name, attribute, string or doctest; ``unit`` the top-level definition that
    holds it (``function``, ``Class``, ``Class.method``, a constant), if any; ``in_class`` the
    class whose body (not a method) runs it.
    """

    identifier: str
    kind: str
    line: int
    is_import_time: bool
    unit: str | None
    in_class: str | None
    chain: str | None = None


@dataclass(eq=False, repr=False)
class SourceFile:
    """What ``read_source`` finds. Names map to all parts: overloads, both arms of a condition, setters."""

    path: str
    text: str
    lines: Lines
    tree: ast.Module
    module: str
    definitions: dict[str, list[Definition]] = field(default_factory=dict)
    methods: dict[tuple[str, str], list[Function]] = field(default_factory=dict)
    imports: list[ImportedName] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    bindings: dict[str, int] = field(default_factory=dict)
    """Module-level bindings by name that are neither definitions nor imports: how many."""
    assignments: dict[str, ast.stmt] = field(default_factory=dict)
    """``NAME = …`` directly in the module, the last one of each name."""
    exports: list[Items] = field(default_factory=list)
    """The literal lists that make up ``__all__``."""
    phrases: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    """Line and words of other strings on one line: they may be annotations."""

    @property
    def is_package(self) -> bool:
        return PurePosixPath(self.path).stem == "__init__"

    @property
    def is_stub(self) -> bool:
        return self.path.endswith(".pyi")

    @property
    def is_test(self) -> bool:
        return is_test_path(self.path)

    def binds(self, name: str) -> bool:
        """Whether the module itself gives the name a meaning at module level."""
        imported = any(found.bound == name and found.is_module_level for found in self.imports)
        return imported or name in self.definitions or name in self.bindings

    @cached_property
    def exported(self) -> frozenset[str]:
        """The strings in ``__all__``."""
        return frozenset(name for items in self.exports for name in strings_of(items))

    @cached_property
    def uses_by_identifier(self) -> dict[str, list[Use]]:
        """``uses``, grouped."""
        found: dict[str, list[Use]] = {}
        for use in self.uses:
            found.setdefault(use.identifier, []).append(use)
        return found

    def constant(self, name: str) -> ast.stmt | None:
        """The assignment of a module-level name that is bound nowhere else in the module."""
        is_single = self.bindings.get(name) == 1 and name not in self.definitions
        is_dunder = name.startswith("__") and name.endswith("__")
        return self.assignments.get(name) if is_single and not is_dunder else None

    def span(self, node: ast.stmt) -> tuple[int, int]:
        """First line (decorators included) and last line of a statement."""
        return first_line(node), node.end_lineno or node.lineno


def module_name(path: str, roots: Iterable[str] = ()) -> str:
    """The dotted name under which a file is imported: ``src/a/b.py`` and ``a/b.py`` are ``a.b``.

    ``roots`` are places of import besides the usual ones.
    """
    parts = list(PurePosixPath(below_root(path, (*roots, *_FLAT_ROOTS))).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


def statement_blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements below a node, outermost first."""
    for part in ("body", "orelse", "finalbody"):
        block = getattr(node, part, None)
        if isinstance(block, list) and block:
            yield block
            for statement in block:
                yield from statement_blocks(statement)
    for arm in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield from statement_blocks(arm)


def absolute_target(statement: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The module that ``from … import`` names, with its dots resolved."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - statement.level + (1 if is_package else 0)]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def dotted_text(node: ast.expr) -> str | None:
    """``a.b.c`` for a plain chain of names, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted_text(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is ``TYPE_CHECKING`` or ``typing.TYPE_CHECKING``."""
    return (dotted_text(test) or "").rpartition(".")[2] == "TYPE_CHECKING"


def strings_of(items: Items) -> Iterator[str]:
    """The strings among the elements of a literal list."""
    for element in items.elts:
        if isinstance(element, ast.Constant) and isinstance(element.value, str):
            yield element.value
