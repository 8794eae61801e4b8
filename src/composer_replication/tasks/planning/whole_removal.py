"""Take whole definitions out of the source files of a repository, with every way to reach them."""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import groupby

from composer_replication.records import Edit
from composer_replication.tasks.planning.edits import Changes, Lines, edited_text
from composer_replication.tasks.planning.symbol_graph import (
    ImportStatement,
    Items,
    Name,
    Reach,
    SourceFile,
    SymbolGraph,
)
from composer_replication.tasks.syntax_trees import Definition, blocks_of, first_line, parsed

# --- Take statements, imported names and list entries out of one file; all else stays to the byte.

_List = ImportStatement | Items
_Span = tuple[int, int, str]
"""Two offsets, and the text that takes the place of what stands between them."""


class FileCut:
    """What goes out of one file: whole statements, and by index ``items``: names of an import, elements of a list."""

    def __init__(self, path: str, lines: Lines, tree: ast.Module) -> None:
        self._path, self._lines, self._tree = path, lines, tree
        self._statements: set[ast.AST] = set()
        self.items: dict[_List, set[int]] = defaultdict(set)

    def take_statement(self, node: ast.stmt) -> None:
        self._statements.add(node)

    def edits(self) -> tuple[Edit, ...] | None:
        """The edits in order of place; None when what is left does not parse or a line is not cut cleanly."""
        if not self._statements and not self.items:
            return ()
        statements, spans = {*self._statements}, list[_Span]()
        for node, doomed in self.items.items():
            if not isinstance(node, Items) and len(doomed) == len(node.names):
                statements.add(node)
            elif isinstance(node, ast.Tuple) and len(node.elts) < len(doomed) + 2:
                return None  # it would be no tuple any more
            elif node not in statements:
                spans += self._item_spans(node, doomed)
        gone = self._gone_rows(statements)
        if gone is None:
            return None
        spans += self._row_spans(gone)
        edits: list[Edit] = []
        for start, end, text in sorted(spans, key=lambda span: (span[0], -span[1])):
            if not edits or start >= edits[-1].end:  # else it lies in one: an import in a function that goes
                edits.append(Edit(self._path, start, end, text))
        return tuple(edits) if parsed(edited_text(self._lines.text, edits)) else None

    def _gone_rows(self, statements: Collection[ast.AST]) -> dict[int, str] | None:
        """The lines that go, comments right above definitions among them, with what takes the place of each; None where a
        statement shares a line with another.
        """
        gone: dict[int, str] = {}
        lines = self._lines
        for block in _all_blocks(self._tree):
            doomed = [node for node in block if node in statements]
            for node in doomed:
                first, last = first_line(node), node.end_lineno or node.lineno
                if first in gone:
                    continue
                margin = lines.text[lines.starts[node.lineno - 1] : lines.span(node)[0]]
                if margin.strip() or not lines.ends_line(node):
                    return None
                if isinstance(node, Definition | ast.Assign | ast.AnnAssign):
                    while first > 1 and lines.line(first - 1).startswith(f"{margin}#"):
                        first -= 1
                gone.update(dict.fromkeys(range(first, last + 1), ""))
                if node is block[0] and len(doomed) == len(block) and block is not self._tree.body:
                    gone[first] = f"{margin}pass{lines.ending_after(lines.starts[last - 1])}"
        return gone

    def _row_spans(self, gone: dict[int, str]) -> Iterator[_Span]:
        """One span for each run of lines that go. Blank lines above go along where blank lines or the end follow."""
        starts, count = [*self._lines.starts, len(self._lines.text)], len(self._lines.starts)
        top = 0  # up to this line a file or block begins with what goes
        for _, group in groupby(enumerate(sorted(gone)), key=lambda one: one[1] - one[0]):
            run = [number for _, number in group]
            first, last, text = run[0], run[-1], "".join(gone[number] for number in run)
            above, below = first, last
            while not text and above - 1 > top and not self._lines.line(above - 1).strip():
                above -= 1
            while not text and below < count and not self._lines.line(below + 1).strip():
                below += 1
            opens = above == top + 1 or self._lines.line(above - 1).rstrip().endswith(":")
            if opens and not text:
                first, last = above, (top := below)
            elif below > last or below == count:
                first = above
            yield starts[first - 1], starts[last], text

    def _item_spans(self, node: _List, doomed: set[int]) -> Iterator[_Span]:
        """Those that stand side by side go at once, up to the next item; the last ones with the comma before them."""
        places = [self._lines.span(item) for item in (node.elts if isinstance(node, Items) else node.names)]
        for goes, group in groupby(range(len(places)), key=doomed.__contains__):
            if goes:
                run = list(group)
                first, last = run[0], run[-1]
                if last + 1 < len(places):
                    yield places[first][0], places[last + 1][0], ""
                elif first:
                    yield places[first - 1][1], places[last][1], ""
                else:  # the whole of a list
                    start, end = self._lines.span(node)
                    yield start + 1, end - 1, ""


def _all_blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Every list of statements, outermost first; a chain of conditions may be deeper than Python calls itself."""
    pending: list[ast.AST] = [tree]
    for node in pending:
        for block in blocks_of(node):
            yield block
            pending += block


# --- Let test files be collected without a deleted name: only the tests that use it fail.


def open_imports(reach: Reach) -> tuple[Edit, ...]:
    """The edits of test files that import one of the names at the top: there these imports may fail.

    Star imports, those in ``try`` or ``if`` and those that share a line stay as they are.
    """
    doomed: dict[tuple[SourceFile, ImportStatement], list[int]] = defaultdict(list)
    for imported in reach.aliases:
        file, statement = imported.file, imported.statement
        is_alone = not statement.col_offset and file.lines.ends_line(statement)
        if file.is_test and imported.name != "*" and statement in file.tree.body and is_alone:
            doomed[file, statement].append(imported.index)
    edits: list[Edit] = []
    for (file, statement), indices in doomed.items():
        others, *gone = (copy.copy(statement) for _ in range(len(indices) + 1))
        others.names = [name for index, name in enumerate(statement.names) if index not in indices]
        for part, index in zip(gone, indices, strict=True):
            part.names = [statement.names[index]]  # an answer may have one of them and not another
        parts = [f"try:\n    {ast.unparse(part)}\nexcept ImportError:\n    pass" for part in gone]
        text = "\n".join([*parts, *([ast.unparse(others)] if others.names else [])])
        text = text.replace("\n", file.lines.ending_after(0) or "\n")
        edits.append(Edit(file.path, *file.lines.span(statement), text))
    return tuple(edits)


# --- Take the definitions themselves out of the source files.


def remove_whole(graph: SymbolGraph, selection: Collection[Name]) -> Changes | None:
    """Everything that goes with some names. None when a file could not be cut cleanly; whether what remains can be imported
    is shown by the run of its tests.
    """
    modules = [module for module, name in selection if name == "*"]
    gone_files = [file for module in modules for file in graph.by_module[module]]
    removed = tuple(sorted(file.path for file in gone_files))
    names = {(module, name) for module, name in selection if "." not in name and name != "*"}
    for module in modules:
        parent, _, last = module.rpartition(".")
        if not any(last in file.bound for file in graph.by_module[parent]):
            names.add((parent, last))  # importing a module binds it in its package
    names |= {(file.module, name) for file in gone_files for name in file.bound if "." not in name}
    reach = graph.reach(names, modules)
    edits: list[Edit] = []
    for file in graph.sources:
        own = () if file.path in removed else _cut_of(file, selection, reach).edits()
        if own is None:
            return None
        edits += own
    return Changes(tuple(edits), removed, open_imports(reach))


def _cut_of(file: SourceFile, selection: Collection[Name], reach: Reach) -> FileCut:
    """Definitions, exports and imports go out of a file."""
    cut = FileCut(file.path, file.lines, file.tree)
    for name in (name for module, name in selection if module == file.module):
        for node in file.definitions.get(name, ()):
            cut.take_statement(node)
    for items in file.exports:
        for index, element in enumerate(items.elts):
            if (file.module, getattr(element, "value", None)) in reach.names:
                cut.items[items].add(index)
    for imported in reach.aliases:
        if imported.file is file:
            cut.items[imported.statement].add(imported.index)
    return cut
