"""Take whole definitions out of the source files of a repository, with every way to reach them."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from composer_replication.records import Edit
from composer_replication.tasks.planning.edits import LINE_END, Lines, edited_text
from composer_replication.tasks.planning.source_file import (
    ImportedName,
    ImportStatement,
    Items,
    SourceFile,
    arguments_of,
)
from composer_replication.tasks.planning.symbol_graph import Reach, Selection, SymbolGraph
from composer_replication.tasks.syntax_trees import (
    Definition,
    Function,
    blocks_of,
    docstring_of,
    first_line,
    parsed,
)

# --- Take statements, imported names and list entries out of one file; all else stays to the byte.

_COMMA = re.compile(r"[ \t\f]*,")
_List = ImportStatement | Items
_Span = tuple[int, int, str]
"""Two offsets, and the text that takes the place of what stands between them."""


class FileCut:
    """What goes out of one file: whole statements; by index, names of an import or elements of a literal list."""

    def __init__(self, path: str, lines: Lines, tree: ast.Module) -> None:
        self._path, self._lines, self._tree = path, lines, tree
        self._statements: set[ast.stmt] = set()
        self._items: dict[_List, set[int]] = {}

    def take_statement(self, node: ast.stmt) -> None:
        self._statements.add(node)

    def take_item(self, node: _List, index: int) -> None:
        self._items.setdefault(node, set()).add(index)

    def edits(self) -> tuple[Edit, ...] | None:
        """The edits in order of place; None when what is left does not parse or a line is not cut cleanly."""
        statements: set[ast.AST] = {*self._statements}
        spans: list[_Span] = []
        for node, doomed in self._items.items():
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
        return tuple(edits) if parses_after(self._lines.text, edits) else None

    # --- Statements go with whole lines, with the comments right above definitions and spare blank lines.

    def _gone_rows(self, statements: Collection[ast.AST]) -> dict[int, str] | None:
        """The lines that go, with what takes the place of each; None where a statement shares a line with another."""
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
                    while (
                        first > 1 and first - 1 not in gone and lines.line(first - 1).startswith(f"{margin}#")
                    ):
                        first -= 1
                gone.update(dict.fromkeys(range(first, last + 1), ""))
                if node is block[0] and len(doomed) == len(block) and block is not self._tree.body:
                    gone[first] = f"{margin}pass{lines.ending_after(lines.starts[last - 1])}"
        return gone

    def _row_spans(self, gone: dict[int, str]) -> Iterator[_Span]:
        """One span for each run of lines that go; blank lines between two of them go along."""
        runs: list[tuple[int, int]] = []
        for number in sorted(gone):
            is_next = runs and all(map(self._is_blank, range(runs[-1][1] + 1, number)))
            if is_next and not (gone[number] and runs[-1][1] + 1 < number):
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        starts = [*self._lines.starts, len(self._lines.text)]
        for first, last in runs:
            text = "".join(gone.get(number, "") for number in range(first, last + 1))
            begin, until = (first, last) if text else self._with_blanks(gone, first, last)
            yield starts[begin - 1], starts[until], text

    def _with_blanks(self, gone: Collection[int], first: int, last: int) -> tuple[int, int]:
        """Blank lines on both sides become those of the wider side; none at a file's or block's edge."""
        above, below, count = first, last, len(self._lines.starts)
        while above > 1 and above - 1 not in gone and self._is_blank(above - 1):
            above -= 1
        while below < count and below + 1 not in gone and self._is_blank(below + 1):
            below += 1
        opens = above > 1 and self._indent(above - 1) < self._indent(first)
        if above == 1 or (opens and below < count):
            return first, below
        if below == count:
            return above, last
        return (first, below) if first - above >= below - last else (above, last)

    def _is_blank(self, number: int) -> bool:
        return not self._lines.line(number).strip()

    def _indent(self, number: int) -> int:
        line = self._lines.line(number)
        return len(line) - len(line.lstrip())

    # --- Items go out of a comma-separated list, those that stand side by side at once.

    def _item_spans(self, node: _List, doomed: set[int]) -> Iterator[_Span]:
        places = [self._lines.span(item) for item in (node.elts if isinstance(node, Items) else node.names)]
        head = self._lines.text[self._lines.span(node)[0] : places[0][0]]
        has_brackets = not set("([{").isdisjoint(head)
        for goes, group in groupby(range(len(places)), key=doomed.__contains__):
            if goes:
                run = list(group)
                yield (*self._span_of_run(places, run[0], run[-1] + 1, has_brackets=has_brackets), "")

    def _span_of_run(
        self, places: Sequence[tuple[int, int]], index: int, stop: int, *, has_brackets: bool
    ) -> tuple[int, int]:
        text, start, end = self._lines.text, places[index][0], places[stop - 1][1]
        comma = _COMMA.match(text, end)
        after_comma = comma.end() if comma else end
        line_start = max(text.rfind("\n", 0, start), text.rfind("\r", 0, start)) + 1
        ending = LINE_END.search(text, after_comma)
        line_end, next_line = ending.span() if ending else (len(text), len(text))
        rest = text[after_comma:line_end].strip()
        if has_brackets and not text[line_start:start].strip() and (not rest or rest.startswith("#")):
            return line_start, next_line
        following = places[stop][0] if stop < len(places) else None
        if following is not None and not LINE_END.search(text, end, following):
            return start, following
        if index:
            return places[index - 1][1], end
        return start, after_comma if following is None else following


def parses_after(text: str, edits: Sequence[Edit]) -> bool:
    """Whether a file still parses after its edits."""
    try:
        return parsed(edited_text(text, edits)) is not None
    except ValueError:  # edits that overlap
        return False


def _all_blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements below a node, outermost first."""
    for block in blocks_of(node):
        yield block
        for statement in block:
            yield from _all_blocks(statement)


# --- Let test files be collected without a deleted name: its import moves into the tests that use it.


def moved_import_edits(reach: Reach) -> tuple[Edit, ...]:
    """The edits of test files that import one of the names at module level.

    A file stays as it is when the name is needed to collect it (decorators, parameters, class bases, star imports, an
    import in ``try`` or ``if``).
    """
    by_file: dict[SourceFile, list[ImportedName]] = defaultdict(list)
    for file, imported in reach.aliases:
        if file.is_test and imported.is_module_level:
            by_file[file].append(imported)
    return tuple(edit for file, moved in by_file.items() for edit in _file_edits(file, moved))


def _file_edits(file: SourceFile, moved: list[ImportedName]) -> list[Edit]:
    cut = FileCut(file.path, file.lines, file.tree)
    for imported in moved:
        is_dotted = imported.is_plain and "." in imported.target
        if imported.statement not in file.tree.body or imported.name == "*" or is_dotted:
            return []
        cut.take_item(imported.statement, imported.index)
    inserted, removed = _insertions(file, moved), cut.edits()
    if inserted is None or removed is None:
        return []
    edits = sorted([*removed, *inserted], key=lambda edit: (edit.start, edit.end))
    return edits if parses_after(file.text, edits) else []


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
            text = "".join(f"{margin}{_alone(imported)}{ending}" for imported in wanted)
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


def _alone(imported: ImportedName) -> str:
    """The import of one name."""
    statement = copy.copy(imported.statement)
    statement.names = [statement.names[imported.index]]
    return ast.unparse(statement)


# --- Take the definitions themselves out of the source files.

WholeRemoval = tuple[tuple[Edit, ...], tuple[str, ...], tuple[Edit, ...]]
"""All edits of source files, the files that go altogether, and the edits that move imports in tests."""


def remove_whole(graph: SymbolGraph, selection: Selection) -> WholeRemoval | None:
    """None when a file could not be cut cleanly. Whether what remains can be imported is shown by the run of its tests."""
    gone_files = [file for module in selection.modules for file in graph.files_of(module)]
    removed = tuple(sorted(file.path for file in gone_files))
    names = {name for name in selection.names if "." not in name[1]}
    for module in selection.modules:
        parent, _, last = module.rpartition(".")
        if not any(last in file.bound for file in graph.files_of(parent)):
            names.add((parent, last))  # importing a module binds it in its package
    names |= {(file.module, name) for file in gone_files for name in file.bound if "." not in name}
    reach = graph.reach(names, selection.modules)
    if any(
        imported.is_plain and "." in imported.target and not file.is_test and file.path not in removed
        for file, imported in reach.aliases
    ):
        return None  # ``import a.b`` binds a, too
    edits: list[Edit] = []
    for cut in _cuts_of(graph, selection, reach, removed):
        own = cut.edits()
        if own is None:
            return None
        edits += own
    return tuple(edits), removed, moved_import_edits(reach)


def _cuts_of(
    graph: SymbolGraph, selection: Selection, reach: Reach, removed: Collection[str]
) -> list[FileCut]:
    """Definitions, exports and imports go out of the source files, in order of path."""
    stays = [file for file in graph.files.values() if file.path not in removed and not file.is_test]
    cuts: dict[str, FileCut] = {}

    def cut(file: SourceFile) -> FileCut:
        return cuts.setdefault(file.path, FileCut(file.path, file.lines, file.tree))

    for module, name in selection.names:
        for file in graph.files_of(module):
            for node in [*file.definitions.get(name, []), file.constant(name)]:
                if node is not None:
                    cut(file).take_statement(node)
    for file in stays:
        for items in file.exports:
            for index, element in enumerate(items.elts):
                value = getattr(element, "value", None)
                if isinstance(value, str) and (file.module, value) in reach.names:
                    cut(file).take_item(items, index)
    for file, imported in reach.aliases:
        if file in stays:
            cut(file).take_item(imported.statement, imported.index)
    return [cuts[path] for path in sorted(cuts)]
