"""Take whole definitions out of the source files of a repository, with every way to reach them."""

from __future__ import annotations

import ast
import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from composer_replication.records import Edit
from composer_replication.tasks.planning.source_file import (
    ImportedName,
    ImportStatement,
    SourceFile,
    Use,
    arguments_of,
    is_type_checking,
)
from composer_replication.tasks.planning.symbol_graph import Name, Reach, Selection, SymbolGraph
from composer_replication.tasks.planning.text_cuts import FileCut, parses_after
from composer_replication.tasks.syntax_trees import Function, blocks_of, docstring_of, first_line

# --- Let test files be collected without a deleted name: its import moves into the tests that use it.


def moved_import_edits(graph: SymbolGraph, reach: Reach) -> tuple[Edit, ...]:
    """The edits of test files that import one of the names at module level.

    A file stays as it is when the name is needed to collect it (decorators, parameters,
    class bases, star imports, an import in ``try`` or ``if``), bound a second time, or imported from there by another
    file.
    """
    by_file: dict[SourceFile, list[ImportedName]] = defaultdict(list)
    for file, imported in reach.aliases:
        if file.is_test and not file.is_stub and imported.is_module_level:
            by_file[file].append(imported)
    return tuple(edit for file, moved in by_file.items() for edit in _file_edits(graph, file, moved))


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
    return not (
        imported.name == "*"
        or (imported.is_plain and "." in imported.target)
        or bound in file.bindings
        or bound in file.definitions
        or bound in file.exported
        or len(file.imports_of(bound)) > 1
        or (file.module, bound) in graph.importers
    )


def _insertions(file: SourceFile, moved: list[ImportedName]) -> list[Edit] | None:
    """The imports at the start of each function that uses them; None when the module itself does."""
    outside = _names_used(file.tree)
    edits: list[Edit] = []
    for function in _outer_functions(file.tree.body):
        inside = sum(map(_names_used, function.body), Counter[str]())
        outside -= inside
        own = {argument.arg for argument in arguments_of(function)}
        wanted = [imported for imported in moved if imported.bound in inside and imported.bound not in own]
        if wanted:
            row = function.body[1 if docstring_of(function.body) and function.body[1:] else 0]
            margin = file.lines.line(row.lineno)[: row.col_offset]
            if margin.strip():
                return None  # the function stands on one line
            ending = file.lines.ending_after(0) or "\n"
            position = file.lines.starts[first_line(row) - 1]
            text = "".join(f"{margin}{each}{ending}" for each in _statements(wanted))
            edits.append(Edit(file.path, position, position, text))
    return None if any(imported.bound in outside for imported in moved) else edits


def _names_used(node: ast.AST) -> Counter[str]:
    names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
    return Counter(name.id for name in names if isinstance(name.ctx, ast.Load))


def _outer_functions(body: Iterable[ast.stmt]) -> Iterator[Function]:
    """Functions and methods that lie in no other function."""
    for node in body:
        if isinstance(node, Function):
            yield node
        else:
            for block in blocks_of(node):
                yield from _outer_functions(block)


def _statements(wanted: list[ImportedName]) -> Iterator[str]:
    """One import for each statement that the names come from, in their order."""
    indices: dict[ImportStatement, set[int]] = defaultdict(set)
    for imported in sorted(wanted, key=lambda one: one.statement.lineno):
        indices[imported.statement].add(imported.index)
    for whole, own in indices.items():
        part = copy.copy(whole)
        part.names = [whole.names[index] for index in sorted(own)]
        yield ast.unparse(part)


# --- Take the definitions themselves out of the source files.

WholeRemoval = tuple[tuple[Edit, ...], tuple[str, ...], tuple[Edit, ...]]
"""All edits of source files, the files that go altogether, and the edits that move imports in tests."""


def remove_whole(graph: SymbolGraph, selection: Selection) -> WholeRemoval | None:
    """None when what remains needs the definitions to be imported, when a name has other bindings at module level, or when
    a file could not be cut cleanly.
    """
    removal = _Removal(graph, selection)
    edits = removal.edits()
    return None if edits is None else (edits, removal.removed, moved_import_edits(graph, removal.reach))


class _Removal:
    def __init__(self, graph: SymbolGraph, selection: Selection) -> None:
        self._graph = graph
        self._selection = selection
        gone_files = [file for module in selection.modules for file in graph.files_of(module)]
        self.removed = tuple(sorted(file.path for file in gone_files))
        names = {name for name in selection.names if "." not in name[1]}
        for module in selection.modules:
            parent, _, last = module.rpartition(".")
            if not any(file.binds(last) for file in graph.files_of(parent)):
                names.add((parent, last))  # importing a module binds it in its package
        for file in gone_files:
            bound = {imported.bound for imported in file.imports if imported.is_module_level}
            own = {*file.definitions, *file.bindings, *bound}
            names |= {(file.module, name) for name in own if "." not in name}
        self.reach = graph.reach(names, selection.modules)
        self._cuts: dict[SourceFile, FileCut] = {}
        self._gone: dict[SourceFile, set[int]] = {}
        """Lines of definitions that go."""

    def edits(self) -> tuple[Edit, ...] | None:
        if not self._cut_names():
            return None
        self._gone = {file: cut.gone_lines() for file, cut in self._cuts.items()}
        if self._is_bound_otherwise() or self._is_needed_at_import():
            return None
        for file, lines in self._gone.items():
            if lines and not file.is_package and file.path not in self.removed:
                self._cut_spare_imports(file, lines)
        edits: list[Edit] = []
        for file in sorted(self._cuts, key=lambda file: file.path):
            own = self._cuts[file].edits()
            if own is None:
                return None
            edits += own
        return tuple(edits)

    def _cut(self, file: SourceFile) -> FileCut:
        return self._cuts.setdefault(file, FileCut(file.path, file.lines, file.tree))

    def _cut_names(self) -> bool:
        """Take out definitions, exports and imports; whether no other name vanishes with them."""
        for module, name in self._selection.names:
            for file in self._graph.files_of(module):
                constant = file.constant(name)
                for node in [*file.definitions.get(name, []), *([constant] if constant else [])]:
                    self._cut(file).take_statement(node)
        for file in self._graph.files.values():
            for items in file.exports if not file.is_test and file.path not in self.removed else ():
                for index, element in enumerate(items.elts):
                    value = getattr(element, "value", None)
                    if isinstance(value, str) and (file.module, value) in self.reach.names:
                        self._cut(file).take_item(items, index)
        for file, imported in self.reach.aliases:
            if not file.is_test and file.path not in self.removed:
                if imported.is_plain and "." in imported.target:
                    return False
                self._cut(file).take_item(imported.statement, imported.index)
        return True

    def _is_bound_otherwise(self) -> bool:
        """Whether a module also binds one of the names in a way that stays."""
        doomed = {imported for _, imported in self.reach.aliases}
        for module, name in self.reach.names:
            is_selected = (module, name) in self._selection.names
            for file in self._graph.files_of(module):
                if file.path in self.removed or file.is_test:
                    continue
                if name in file.bindings and not (is_selected and file.constant(name)):
                    return True
                if name in file.definitions and not is_selected:
                    return True
                if not doomed.issuperset(file.imports_of(name)):
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
        return any(map(self._is_method_needed, self._selection.methods))

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
            is_gone = file.path in self.removed or use.line in self._gone.get(file, ())
            if use.is_import_time and not is_gone:
                yield file, use

    def _cut_spare_imports(self, file: SourceFile, gone: set[int]) -> None:
        """Imports that only the deleted lines used: they would hint at the code, and nobody needs them."""
        statements = set(file.tree.body)
        for node in file.tree.body:
            if isinstance(node, ast.If) and not node.orelse and is_type_checking(node.test):
                statements.update(node.body)
        for imported in file.imports:
            if imported.statement in statements and self._is_spare(file, imported, gone):
                self._cut(file).take_item(imported.statement, imported.index)

    def _is_spare(self, file: SourceFile, imported: ImportedName, gone: set[int]) -> bool:
        bound = imported.bound
        if imported.target == "__future__" or imported.name == "*" or bound in file.exported:
            return False
        uses = [use for use in file.uses.get(bound, ()) if use.kind != "attribute"]
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
