"""Take whole definitions out of the source files of a repository, with every way to reach them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from composer_replication.records import Edit
from composer_replication.tasks.planning.source_file import (
    ImportedName,
    SourceFile,
    is_type_checking,
)
from composer_replication.tasks.planning.symbol_graph import Name, Reach, SymbolGraph
from composer_replication.tasks.planning.text_cuts import FileCut


@dataclass(frozen=True, slots=True)
class Selection:
    """What goes: top-level names (constants too), methods (``Class.method``), whole modules (dotted)."""

    names: frozenset[Name] = frozenset()
    methods: frozenset[Name] = frozenset()
    modules: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class WholeRemoval:
    """The edits, the files that go altogether, and every name through which the definitions were had."""

    edits: tuple[Edit, ...]
    removed_files: tuple[str, ...]
    reach: Reach


def remove_whole(graph: SymbolGraph, selection: Selection) -> WholeRemoval | None:
    """All edits of source files, or None when what remains needs the definitions to be imported.

    None too when a name has other bindings at module level, when two definitions differ only
    by a condition that is not theirs, or when a file would not parse any more.
    """
    return _Removal(graph, selection).result()


class _Removal:
    def __init__(self, graph: SymbolGraph, selection: Selection) -> None:
        self._graph = graph
        self._selection = selection
        self._removed = tuple(
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
        self._reach = graph.reach(names, selection.modules)
        self._cuts: dict[str, FileCut] = {}

    def result(self) -> WholeRemoval | None:
        self._cut_definitions()
        self._cut_aliases()
        self._cut_exports()
        if self._is_bound_otherwise() or self._is_needed_at_import():
            return None
        gone = {path: frozenset(cut.gone_lines()) for path, cut in self._cuts.items()}
        for path, lines in gone.items():
            if lines:
                self._cut_spare_imports(self._graph.files[path], lines)
        edits: list[Edit] = []
        for path in sorted(self._cuts):
            own = self._cuts[path].edits()
            if own is None:
                return None
            edits += own
        return WholeRemoval(tuple(edits), self._removed, self._reach)

    def _cut(self, file: SourceFile) -> FileCut:
        return self._cuts.setdefault(file.path, FileCut(file))

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

    def _cut_aliases(self) -> None:
        for file, imported in self._reach.aliases:
            if not file.is_test and file.path not in self._removed:
                replacement = None
                alias = imported.statement.names[imported.index]
                if imported.name is None and alias.asname is None and "." in imported.target:
                    replacement = imported.target.rpartition(".")[0]  # the packages around it stay bound
                self._cut(file).take_alias(imported.statement, imported.index, replacement)

    def _cut_exports(self) -> None:
        for file in self._graph.files.values():
            if file.is_test or file.path in self._removed:
                continue
            for items in file.exports:
                for index, element in enumerate(items.elts):
                    value = getattr(element, "value", None)
                    if isinstance(value, str) and (file.module, value) in self._reach.names:
                        self._cut(file).take_entry(items, index)

    def _is_bound_otherwise(self) -> bool:
        """Whether a module also binds one of the names in a way that stays."""
        doomed = {(file.path, id(found.statement), found.index) for file, found in self._reach.aliases}
        for module, name in self._reach.names:
            for file in self._graph.by_module.get(module, []):
                if file.path in self._removed or file.is_test:
                    continue
                is_chosen = (module, name) in self._selection.names
                if file.bindings.get(name) and not (is_chosen and file.constant(name) is not None):
                    return True
                if name in file.definitions and not is_chosen:
                    return True
                for imported in file.imports:
                    key = (file.path, id(imported.statement), imported.index)
                    if imported.bound == name and imported.is_module_level and key not in doomed:
                        return True
        return False

    def _is_needed_at_import(self) -> bool:
        gone = {path: cut.gone_lines() for path, cut in self._cuts.items()}
        for identifier in {name for _, name in self._reach.names}:
            for file, use in self._graph.uses_of(identifier):
                if file.path in self._removed or use.line in gone.get(file.path, ()):
                    continue
                if not use.is_import_time:
                    continue
                if use.kind == "name" and (file.module, identifier) in self._reach.names:
                    return True
                if use.kind == "attribute" and use.chain and self._is_reached(file, use.chain, identifier):
                    return True
        return any(self._is_method_needed(method, gone) for method in self._selection.methods)

    def _is_reached(self, file: SourceFile, chain: str, name: str) -> bool:
        return (self._graph.resolve(file, chain), name) in self._reach.names

    def _is_method_needed(self, method: Name, gone: dict[str, set[int]]) -> bool:
        """Whether a class body or module level names the method: an alias, a decorator, ``Class.method``."""
        module = method[0]
        owner, _, name = method[1].rpartition(".")
        classes = {f"{where}.{bound}" for where, bound in self._graph.reach([(module, owner)]).names}
        for file, use in self._graph.uses_of(name):
            if not use.is_import_time or use.line in gone.get(file.path, ()):
                continue
            if use.kind == "name" and file.module == module and use.in_class == owner:
                return True
            if use.kind == "attribute" and use.chain and self._graph.resolve(file, use.chain) in classes:
                return True
        return False

    def _cut_spare_imports(self, file: SourceFile, gone: frozenset[int]) -> None:
        """Imports that only the deleted lines used: they would hint at the code, and nobody needs them."""
        if file.is_package or file.path in self._removed:
            return
        guarded = {
            id(statement)
            for node in file.tree.body
            for statement in ([node] if not hasattr(node, "body") else _typing_block(node))
        }
        cut = self._cut(file)
        for imported in file.imports:
            if id(imported.statement) in guarded and self._is_spare(file, imported, gone):
                cut.take_alias(imported.statement, imported.index)

    def _is_spare(self, file: SourceFile, imported: ImportedName, gone: frozenset[int]) -> bool:
        bound = imported.bound
        if imported.target == "__future__" or imported.name == "*" or bound in file.exported:
            return False
        if file.bindings.get(bound) or bound in file.definitions:
            return False
        uses = [use for use in file.uses_by_identifier.get(bound, ()) if use.kind != "attribute"]
        inside = any(use.line in gone and use.kind == "name" for use in uses)
        outside = any(use.line not in gone for use in uses)
        outside = outside or any(bound in words and line not in gone for line, words in file.phrases)
        if not inside or outside:
            return False
        if self._graph.importers_of((file.module, bound)):
            return False
        if self._graph.importers_of((file.module, "*")) and self._graph.star_exports(file.module, bound):
            return False
        return not any(
            use.kind == "attribute" and use.chain and self._graph.resolve(other, use.chain) == file.module
            for other, use in self._graph.uses_of(bound)
        )


def _typing_block(node: ast.stmt) -> list[ast.stmt]:
    is_typing = isinstance(node, ast.If) and not node.orelse and is_type_checking(node.test)
    return node.body if is_typing and isinstance(node, ast.If) else []
