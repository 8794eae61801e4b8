"""Take whole definitions out of the source files of a repository, with every way to reach them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from itertools import groupby

from composer_replication.records import Edit
from composer_replication.tasks.planning.edits import LINE_END
from composer_replication.tasks.planning.source_file import (
    Function,
    ImportedName,
    SourceFile,
    Use,
    arguments_of,
    is_type_checking,
)
from composer_replication.tasks.planning.symbol_graph import Name, Reach, Selection, SymbolGraph
from composer_replication.tasks.planning.text_cuts import FileCut, parses_after
from composer_replication.tasks.syntax_trees import blocks_of, docstring_of, first_line

# --- Let test files be collected without a deleted name: its import moves into the tests that use it.


def moved_import_edits(graph: SymbolGraph, reach: Reach) -> tuple[Edit, ...]:
    """The edits of test files that import one of the names at module level.

    A file stays as it is when the name is needed to collect it (decorators, parameters,
    class bases, star imports, an import in ``try`` or ``if``), bound a second time, or imported from there by another
    file.
    """
    by_file: dict[str, list[ImportedName]] = {}
    for file, imported in reach.aliases:
        if file.is_test and not file.is_stub and imported.is_module_level:
            by_file.setdefault(file.path, []).append(imported)
    return tuple(
        edit for path in sorted(by_file) for edit in _file_edits(graph, graph.files[path], by_file[path])
    )


def _file_edits(graph: SymbolGraph, file: SourceFile, moved: list[ImportedName]) -> list[Edit]:
    cut = FileCut(file.path, file.lines, file.tree)
    for imported in moved:
        if imported.statement not in file.tree.body or not _can_move(graph, file, imported):
            return []
        cut.take_item(imported.statement, imported.index)
    inserted, removed = _insertions(file, moved), cut.edits()
    if inserted is None or removed is None:
        return []
    edits = sorted([*removed, *inserted], key=lambda edit: (edit.start, edit.end))
    return edits if parses_after(file.text, edits) else []


def _can_move(graph: SymbolGraph, file: SourceFile, imported: ImportedName) -> bool:
    bound = imported.bound
    rivals = [other for other in file.imports if other.bound == bound and other.is_module_level]
    return not (
        imported.name == "*"
        or (imported.is_plain and "." in imported.target)
        or file.bindings.get(bound)
        or bound in file.definitions
        or bound in file.exported
        or len(rivals) > 1
        or graph.importers.get((file.module, bound))
    )


def _insertions(file: SourceFile, moved: list[ImportedName]) -> list[Edit] | None:
    """The imports at the start of each function that uses them; None when the module itself does."""
    inside: set[int] = set()
    edits: list[Edit] = []
    for function in _outer_functions(file.tree.body):
        nodes = [node for child in function.body for node in ast.walk(child)]
        inside.update(map(id, nodes))
        used = _names_used(nodes) - {argument.arg for argument in arguments_of(function)}
        wanted = [imported for imported in moved if imported.bound in used]
        if wanted:
            after_docstring = function.body[1:] if docstring_of(function.body) else []
            row = (after_docstring or function.body)[0]
            margin = file.lines.line(row.lineno)[: row.col_offset]
            if margin.strip():
                return None  # the function stands on one line
            ending = LINE_END.search(file.text)
            text = "".join(
                f"{margin}{each}{ending[0] if ending else chr(10)}" for each in _statements(wanted)
            )
            position = file.lines.starts[first_line(row) - 1]
            edits.append(Edit(file.path, position, position, text))
    outside = _names_used(node for node in ast.walk(file.tree) if id(node) not in inside)
    return None if any(imported.bound in outside for imported in moved) else edits


def _names_used(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _outer_functions(body: Iterable[ast.stmt]) -> Iterator[Function]:
    """Functions and methods that lie in no other function."""
    for node in body:
        if isinstance(node, Function):
            yield node
        else:
            for block in blocks_of(node):
                yield from _outer_functions(block)


def _statements(wanted: list[ImportedName]) -> list[str]:
    """One import for each statement that the names come from, in their order."""
    in_order = sorted(wanted, key=lambda one: (one.statement.lineno, one.index))
    statements = []
    for _, group in groupby(in_order, key=lambda one: id(one.statement)):
        own = list(group)
        statement = copy.copy(own[0].statement)
        statement.names = [statement.names[one.index] for one in own]
        statements.append(ast.unparse(statement))
    return statements


# --- Take the definitions themselves out of the source files.

WholeRemoval = tuple[tuple[Edit, ...], tuple[str, ...], tuple[Edit, ...]]
"""All edits of source files, the files that go altogether, and the edits that move imports in tests."""


def remove_whole(graph: SymbolGraph, selection: Selection) -> WholeRemoval | None:
    """None when what remains needs the definitions to be imported, when a name has other bindings at module level, or when
    a file could not be cut cleanly.
    """
    removal = _Removal(graph, selection)
    edits = removal.edits()
    if edits is None:
        return None
    return edits, removal.removed, moved_import_edits(graph, removal.reach)


class _Removal:
    def __init__(self, graph: SymbolGraph, selection: Selection) -> None:
        self._graph = graph
        self._selection = selection
        self.removed = tuple(
            sorted(file.path for module in selection.modules for file in graph.by_module.get(module, []))
        )
        names = set(selection.names)
        for module in selection.modules:
            parent, _, last = module.rpartition(".")
            if not any(file.binds(last) for file in graph.by_module.get(parent, [])):
                names.add((parent, last))  # importing a module binds it in its package
            for file in graph.by_module.get(module, []):
                bound = {imported.bound for imported in file.imports if imported.is_module_level}
                names |= {(module, name) for name in {*file.definitions, *file.bindings, *bound}}
        self.reach = graph.reach(names, selection.modules)
        self._cuts: dict[str, FileCut] = {}
        self._gone: dict[str, set[int]] = {}
        """Lines of definitions that go, by path."""

    def edits(self) -> tuple[Edit, ...] | None:
        self._cut_definitions()
        self._cut_exports()
        if not self._cut_aliases():
            return None
        self._gone = {path: cut.gone_lines() for path, cut in self._cuts.items()}
        if self._is_bound_otherwise() or self._is_needed_at_import():
            return None
        for path, lines in self._gone.items():
            if lines:
                self._cut_spare_imports(self._graph.files[path], lines)
        edits: list[Edit] = []
        for path in sorted(self._cuts):
            own = self._cuts[path].edits()
            if own is None:
                return None
            edits += own
        return tuple(edits)

    def _cut(self, file: SourceFile) -> FileCut:
        return self._cuts.setdefault(file.path, FileCut(file.path, file.lines, file.tree))

    def _cut_definitions(self) -> None:
        for module, name in sorted(self._selection.names):
            for file in self._graph.by_module.get(module, []):
                for node in file.definitions.get(name, []):
                    self._cut(file).take_statement(node)
                constant = file.constant(name)
                if constant is not None:
                    self._cut(file).take_statement(constant)
        for module, dotted in sorted(self._selection.methods):
            owner, _, name = dotted.rpartition(".")
            for file in self._graph.by_module.get(module, []):
                for node in file.methods.get((owner, name), []):
                    self._cut(file).take_statement(node)

    def _cut_aliases(self) -> bool:
        """Whether no other name vanishes with them."""
        for file, imported in self.reach.aliases:
            if not file.is_test and file.path not in self.removed:
                if imported.is_plain and "." in imported.target:
                    return False
                self._cut(file).take_item(imported.statement, imported.index)
        return True

    def _cut_exports(self) -> None:
        for file in self._graph.files.values():
            if file.is_test or file.path in self.removed:
                continue
            for items in file.exports:
                for index, element in enumerate(items.elts):
                    value = getattr(element, "value", None)
                    if isinstance(value, str) and (file.module, value) in self.reach.names:
                        self._cut(file).take_item(items, index)

    def _is_bound_otherwise(self) -> bool:
        """Whether a module also binds one of the names in a way that stays."""
        doomed = {id(found) for _, found in self.reach.aliases}
        for module, name in self.reach.names:
            for file in self._graph.by_module.get(module, []):
                if file.path in self.removed or file.is_test:
                    continue
                is_constant = (module, name) in self._selection.names and file.constant(name) is not None
                if file.bindings.get(name) and not is_constant:
                    return True
                if name in file.definitions and (module, name) not in self._selection.names:
                    return True
                others = [found for found in file.imports if found.bound == name and found.is_module_level]
                if any(id(found) not in doomed for found in others):
                    return True
        return False

    def _is_needed_at_import(self) -> bool:
        for identifier in {name for _, name in self.reach.names}:
            for file, use in self._left_at_import(identifier):
                home = file.module
                if use.kind == "attribute" and use.chain:
                    home = self._graph.resolve(file, use.chain)
                elif use.kind != "name":
                    continue
                if (home, identifier) in self.reach.names:
                    return True
        return any(self._is_method_needed(method) for method in self._selection.methods)

    def _is_method_needed(self, method: Name) -> bool:
        """Whether a class body or module level names the method: an alias, a decorator, ``Class.method``."""
        module, dotted = method
        owner, _, name = dotted.rpartition(".")
        classes = {f"{where}.{bound}" for where, bound in self._graph.reach([(module, owner)]).names}
        for file, use in self._left_at_import(name):
            if use.kind == "name" and file.module == module and use.in_class == owner:
                return True
            if use.kind == "attribute" and use.chain and self._graph.resolve(file, use.chain) in classes:
                return True
        return False

    def _left_at_import(self, identifier: str) -> Iterator[tuple[SourceFile, Use]]:
        """The uses in what stays that come about when a module is imported."""
        for file, use in self._graph.uses_of(identifier):
            is_gone = file.path in self.removed or use.line in self._gone.get(file.path, ())
            if use.is_import_time and not is_gone:
                yield file, use

    def _cut_spare_imports(self, file: SourceFile, gone: set[int]) -> None:
        """Imports that only the deleted lines used: they would hint at the code, and nobody needs them."""
        if file.is_package or file.path in self.removed:
            return
        guarded = {
            id(statement)
            for node in file.tree.body
            for statement in ([node] if not hasattr(node, "body") else _typing_block(node))
        }
        cut = self._cut(file)
        for imported in file.imports:
            if id(imported.statement) in guarded and self._is_spare(file, imported, gone):
                cut.take_item(imported.statement, imported.index)

    def _is_spare(self, file: SourceFile, imported: ImportedName, gone: set[int]) -> bool:
        bound = imported.bound
        if imported.target == "__future__" or imported.name == "*" or bound in file.exported:
            return False
        uses = [use for use in file.uses_by_identifier.get(bound, ()) if use.kind != "attribute"]
        inside = any(use.line in gone and use.kind == "name" for use in uses)
        outside = any(use.line not in gone for use in uses)
        outside = outside or any(bound in words and line not in gone for line, words in file.phrases)
        return inside and not outside and not self._is_taken_from(file.module, bound)

    def _is_taken_from(self, module: str, bound: str) -> bool:
        """Whether another file, or a test, has the name from this module, to which it was only imported."""
        importers = self._graph.importers
        if (module, bound) in importers:
            return True
        if (module, "*") in importers and self._graph.star_exports(module, bound):
            return True
        return any(
            use.kind == "attribute" and use.chain and self._graph.resolve(file, use.chain) == module
            for file, use in self._graph.uses_of(bound)
        )


def _typing_block(node: ast.stmt) -> list[ast.stmt]:
    is_typing = isinstance(node, ast.If) and not node.orelse and is_type_checking(node.test)
    return node.body if is_typing and isinstance(node, ast.If) else []
