"""Let test files be collected without a deleted name: its import moves into the tests that use it.

Only tests that use the name fail then, under the node ids that they had.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from composer_replication.records import Edit
from composer_replication.tasks.planning.edits import LINE_END
from composer_replication.tasks.planning.source_file import Function, ImportedName, SourceFile
from composer_replication.tasks.planning.symbol_graph import Reach, SymbolGraph
from composer_replication.tasks.planning.text_cuts import FileCut, parses_after
from composer_replication.tasks.syntax_trees import first_line


def moved_import_edits(graph: SymbolGraph, reach: Reach) -> tuple[Edit, ...]:
    """The edits of test files that import one of the names at module level.

    A file stays as it is when the name is needed to collect it (decorators, parameters,
    class bases, star imports, an import in ``try`` or ``if``), bound a second time (in a
    function too, where it is also read), or imported from there by another file.
    """
    by_file: dict[str, list[ImportedName]] = {}
    for file, imported in reach.aliases:
        if file.is_test and not file.is_stub and imported.is_module_level:
            by_file.setdefault(file.path, []).append(imported)
    edits: list[Edit] = []
    for path in sorted(by_file):
        file = graph.files[path]
        edits += _file_edits(graph, file, by_file[path])
    return tuple(edits)


def _file_edits(graph: SymbolGraph, file: SourceFile, found: list[ImportedName]) -> list[Edit]:
    cut = FileCut(file)
    top = {id(statement) for statement in file.tree.body}
    moved: list[ImportedName] = []
    for imported in found:
        if id(imported.statement) not in top or imported.name == "*":
            return []
        if not _can_move(graph, file, imported):
            return []
        alias = imported.statement.names[imported.index]
        parent = None
        if imported.name is None and alias.asname is None and "." in imported.target:
            parent = imported.target.rpartition(".")[0]
        cut.take_alias(imported.statement, imported.index, parent)
        moved.append(imported)
    inserted = _insertions(file, moved)
    removed = cut.edits()
    if inserted is None or removed is None:
        return []
    edits = sorted([*removed, *inserted], key=lambda edit: (edit.start, edit.end))
    return edits if parses_after(file.text, edits) else []


def _can_move(graph: SymbolGraph, file: SourceFile, imported: ImportedName) -> bool:
    bound = imported.bound
    if file.bindings.get(bound) or bound in file.definitions:
        return False
    if graph.importers_of((file.module, bound)) or bound in file.exported:
        return False
    rivals = [other for other in file.imports if other.bound == bound and other.is_module_level]
    if imported.name is not None or imported.statement.names[imported.index].asname:
        return len(rivals) == 1
    return all(other.name is None for other in rivals)


def _insertions(file: SourceFile, moved: list[ImportedName]) -> list[Edit] | None:
    """The imports at the start of each function that uses them; None when the module itself does."""
    spans: set[int] = set()
    edits: list[Edit] = []
    for function in _outer_functions(file.tree.body):
        nodes = [node for child in function.body for node in ast.walk(child)]
        spans.update(map(id, nodes))
        wanted = []
        for imported in moved:
            if imported.bound in _parameters(function) or not any(_is_use(node, imported) for node in nodes):
                continue
            if any(_stores(node, imported.bound) for node in nodes):
                return None  # which of its uses are the module's name is not plain to see
            wanted.append(imported)
        if wanted:
            edits.append(_insertion(file, function, wanted))
    for node in ast.walk(file.tree):
        if id(node) not in spans and any(_is_use(node, imported) for imported in moved):
            return None
    return edits


def _outer_functions(body: Iterable[ast.stmt]) -> Iterator[Function]:
    """Functions and methods that lie in no other function."""
    for node in body:
        if isinstance(node, Function):
            yield node
        else:
            for part in ("body", "orelse", "finalbody"):
                yield from _outer_functions(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _outer_functions(handler.body)


def _parameters(function: Function) -> set[str]:
    names = function.args
    every = [*names.posonlyargs, *names.args, *names.kwonlyargs, names.vararg, names.kwarg]
    return {argument.arg for argument in every if argument is not None}


def _stores(node: ast.AST, bound: str) -> bool:
    return isinstance(node, ast.Name) and node.id == bound and isinstance(node.ctx, ast.Store)


def _is_use(node: ast.AST, imported: ImportedName) -> bool:
    alias = imported.statement.names[imported.index]
    if imported.name is None and alias.asname is None and "." in imported.target:
        return isinstance(node, ast.Attribute) and _dotted(node) == imported.target
    return isinstance(node, ast.Name) and node.id == imported.bound and not isinstance(node.ctx, ast.Store)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _insertion(file: SourceFile, function: Function, wanted: list[ImportedName]) -> Edit:
    first = function.body[0]
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
        and len(function.body) > 1
    )
    node = function.body[1] if is_docstring else first
    statements = _statements(wanted)
    lines = file.lines
    number = first_line(node)
    start = lines.offset(node.lineno, node.col_offset)
    margin = lines.text[lines.starts[node.lineno - 1] : start]
    if margin.strip():
        return Edit(file.path, start, start, "".join(f"{statement}; " for statement in statements))
    ending = LINE_END.search(lines.text)
    text = "".join(f"{margin}{statement}{ending[0] if ending else chr(10)}" for statement in statements)
    position = lines.starts[number - 1]
    return Edit(file.path, position, position, text)


def _statements(wanted: list[ImportedName]) -> list[str]:
    """One import for each statement that the names come from, in their order."""
    by_statement: dict[int, list[ImportedName]] = {}
    for imported in sorted(wanted, key=lambda one: (one.statement.lineno, one.index)):
        by_statement.setdefault(id(imported.statement), []).append(imported)
    found = []
    for group in by_statement.values():
        statement = group[0].statement
        aliases = [statement.names[imported.index] for imported in group]
        said = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in aliases)
        if isinstance(statement, ast.ImportFrom):
            found.append(f"from {'.' * statement.level}{statement.module or ''} import {said}")
        else:
            found.append(f"import {said}")
    return found
