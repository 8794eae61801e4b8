"""Read one Python file without running it: see ``source_file`` for what comes out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.planning.source_file import (
    Function,
    ImportedName,
    Items,
    SourceFile,
    Use,
    absolute_target,
    dotted_text,
    is_type_checking,
    module_name,
)
from composer_replication.tasks.syntax_trees import parse_syntax

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
        arguments = node.args
        self._visit_all([*node.decorator_list, *arguments.defaults, *arguments.kw_defaults])
        every = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        notes = [argument.annotation for argument in every if argument is not None]
        self._visit_all([*notes, node.returns], call_time=self._future_annotations)
        self._depth += 1
        self._visit_all([*getattr(node, "type_params", []), *node.body], call_time=True)
        self._depth -= 1
        self._unit = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

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

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.annotation], call_time=self._future_annotations)
        self._assign([node.target], node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assign([node.target], node.value)

    def _assign(self, targets: list[ast.expr], value: ast.expr | None) -> None:
        is_export = self._at_module_level and any(dotted_text(target) == "__all__" for target in targets)
        self._visit_all(targets)
        if value is None:
            return
        if is_export:
            self._export(value)
        else:
            self.visit(value)

    def _export(self, value: ast.expr) -> None:
        """``[…]``, ``(…)``, ``[…] + other.__all__``: literal lists are exports, the rest are uses."""
        if isinstance(value, Items):
            self._found.exports.append(value)
            self._visit_all(item for item in value.elts if not isinstance(item, ast.Constant))
        elif isinstance(value, ast.BinOp):
            self._export(value.left)
            self._export(value.right)
        elif isinstance(value, ast.Call) and len(value.args) == 1 and isinstance(value.func, ast.Name):
            self.visit(value.func)  # tuple([...]), list(...), sorted(...)
            self._export(value.args[0])
        else:
            self.visit(value)

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

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name and self._at_module_level:
            self._bind(node.name)
        self.generic_visit(node)

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
