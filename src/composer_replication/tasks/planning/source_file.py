"""One Python file, read without running it: what it defines, imports, exports and uses, and when.

*Import time* is what runs when the module is imported: module level, class bodies,
decorators, default arguments, base classes, annotations that are evaluated. Everything else
is *call time*: function bodies, ``if TYPE_CHECKING``, ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

from composer_replication.tasks.intake.tree_rules import below_root, is_test_path
from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import parse_syntax

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

    @property
    def is_plain(self) -> bool:
        """Whether it is an ``import a`` or ``import a.b``, which binds ``a``."""
        return self.name is None and self.statement.names[self.index].asname is None


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
        values = [getattr(element, "value", None) for items in self.exports for element in items.elts]
        return frozenset(value for value in values if isinstance(value, str))

    @cached_property
    def uses_by_identifier(self) -> dict[str, list[Use]]:
        found: dict[str, list[Use]] = {}
        for use in self.uses:
            found.setdefault(use.identifier, []).append(use)
        return found

    def constant(self, name: str) -> ast.stmt | None:
        """The assignment of a module-level name that is bound nowhere else in the module."""
        is_single = self.bindings.get(name) == 1 and name not in self.definitions
        is_dunder = name.startswith("__") and name.endswith("__")
        return self.assignments.get(name) if is_single and not is_dunder else None


def module_name(path: str, roots: Iterable[str] = ()) -> str:
    """The dotted name under which a file is imported: ``src/a/b.py`` and ``a/b.py`` are ``a.b``.

    ``roots`` are places of import besides the usual ones.
    """
    parts = list(PurePosixPath(below_root(path, (*roots, *_FLAT_ROOTS))).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts = parts[:-1]
    return ".".join(parts)


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


def arguments_of(function: Function) -> list[ast.arg]:
    """All parameters of a function."""
    return [node for node in ast.iter_child_nodes(function.args) if isinstance(node, ast.arg)]


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is ``TYPE_CHECKING`` or ``typing.TYPE_CHECKING``."""
    return (dotted_text(test) or "").rpartition(".")[2] == "TYPE_CHECKING"


# --- Read one Python file without running it.

_DOCTEST = re.compile(r"^\s*(?:>>>|\.\.\.)(.*)$", re.MULTILINE)
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def read_source(path: str, content: bytes, roots: Iterable[str] = ()) -> SourceFile | None:
    """Read a ``.py`` or ``.pyi`` file; None when it does not parse, is not UTF-8 or starts with a BOM."""
    try:
        text = content.decode()
        tree = parse_syntax(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = SourceFile(path, text, Lines(text), tree, module_name(path, roots))
    try:
        _Reader(found).read()
    except RecursionError:
        return None
    return found


def _single_target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


class _Reader(ast.NodeVisitor):
    def __init__(self, found: SourceFile) -> None:
        self._found = found
        self._is_import_time = True
        self._unit: str | None = None
        self._classes: list[str] = []
        self._depth = 0  # functions around
        self._comprehensions = 0
        self._future_annotations = any(
            isinstance(node, ast.ImportFrom)
            and node.module == "__future__"
            and any(alias.name == "annotations" for alias in node.names)
            for node in found.tree.body
        )

    def read(self) -> None:
        for statement in self._found.tree.body:
            name = _single_target(statement)
            if name is not None:
                self._found.assignments[name] = statement
                self._unit = name
            self.visit(statement)
            self._unit = None

    @property
    def _at_module_level(self) -> bool:
        return not (self._depth or self._classes or self._comprehensions)

    def _note(self, identifier: str, kind: str, line: int, chain: str | None = None) -> None:
        in_body = self._classes and not (self._depth or self._comprehensions)
        inside = ".".join(self._classes) if in_body else None
        when, unit = self._is_import_time, self._unit
        self._found.uses.append(Use(identifier, kind, line, when, unit, inside, chain))

    def _visit_all(self, nodes: Iterable[ast.AST | None], *, call_time: bool = False) -> None:
        before = self._is_import_time
        self._is_import_time = before and not call_time
        for node in nodes:
            if node is not None:
                self.visit(node)
        self._is_import_time = before

    def _visit_function(self, node: Function) -> None:
        before = self._unit
        if self._at_module_level:
            self._found.definitions.setdefault(node.name, []).append(node)
            self._unit = node.name
        elif not self._depth:
            owner = ".".join(self._classes)
            self._found.methods.setdefault((owner, node.name), []).append(node)
            self._unit = f"{owner}.{node.name}"
        self._visit_all([*node.decorator_list, *node.args.defaults, *node.args.kw_defaults])
        notes = [argument.annotation for argument in arguments_of(node)]
        self._visit_all([*notes, node.returns], call_time=self._future_annotations)
        self._depth += 1
        self._visit_all([*getattr(node, "type_params", []), *node.body], call_time=True)
        self._depth -= 1
        self._unit = before

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        is_top = self._at_module_level
        if is_top:
            self._found.definitions.setdefault(node.name, []).append(node)
            self._unit = node.name
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._classes.append(node.name)
        self._visit_all(node.body)
        self._classes.pop()
        if is_top:
            self._unit = None

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all([*node.args.defaults, *node.args.kw_defaults])
        self._depth += 1
        self._visit_all([node.body], call_time=True)
        self._depth -= 1

    def _visit_comprehension(self, node: ast.AST) -> None:
        self._comprehensions += 1  # its variables are its own
        self.generic_visit(node)
        self._comprehensions -= 1

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        is_main = (
            isinstance(node.test, ast.Compare)
            and isinstance(node.test.left, ast.Name)
            and node.test.left.id == "__name__"
        )
        self._visit_all(node.body, call_time=is_main or is_type_checking(node.test))
        self._visit_all(node.orelse)

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.AnnAssign):
            self._visit_all([node.annotation], call_time=self._future_annotations)
        self._visit_all(targets)
        if self._at_module_level and any(dotted_text(target) == "__all__" for target in targets):
            self._export(node.value)
        else:
            self._visit_all([node.value])

    visit_Assign = visit_AnnAssign = visit_AugAssign = _visit_assignment

    def _export(self, value: ast.expr | None) -> None:
        """``[…]``, ``(…)``, ``[…] + other.__all__``, ``sorted([…])``: literal lists are exports, the rest are uses."""
        if isinstance(value, Items):
            self._found.exports.append(value)
            self._visit_all(item for item in value.elts if not isinstance(item, ast.Constant))
        elif isinstance(value, ast.BinOp):
            self._export(value.left)
            self._export(value.right)
        elif isinstance(value, ast.Call):
            for part in (value.func, *value.args, *(keyword.value for keyword in value.keywords)):
                self._export(part)
        else:
            self._visit_all([value])

    def visit_Import(self, node: ast.Import) -> None:
        for index, alias in enumerate(node.names):
            bound = alias.asname or alias.name.partition(".")[0]
            imported = ImportedName(alias.name, None, bound, node, index, self._at_module_level)
            self._found.imports.append(imported)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        target = absolute_target(node, self._found.module, is_package=self._found.is_package)
        for index, alias in enumerate(node.names):
            imported = ImportedName(
                target, alias.name, alias.asname or alias.name, node, index, self._at_module_level
            )
            self._found.imports.append(imported)

    def visit_Global(self, node: ast.Global) -> None:
        for name in node.names:
            self._bind(name)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Store):
            self._note(node.id, "name", node.lineno)
        elif self._at_module_level:
            self._bind(node.id)

    def _bind(self, name: str) -> None:
        self._found.bindings[name] = self._found.bindings.get(name, 0) + 1

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = dotted_text(node.value)
        line = node.end_lineno or node.lineno
        self._note(node.attr, "attribute", line, chain)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        if _DOTTED.fullmatch(node.value):
            chain, _, last = node.value.rpartition(".")
            self._note(last, "string", node.lineno, chain or None)
        elif ">>>" in node.value:
            said = " ".join(_DOCTEST.findall(node.value))
            for name in sorted(set(_IDENTIFIER.findall(said))):
                self._note(name, "doctest", node.lineno)
        elif "\n" not in node.value:
            self._found.phrases.append((node.lineno, frozenset(_IDENTIFIER.findall(node.value))))
