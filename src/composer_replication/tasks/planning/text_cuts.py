"""Take statements, imported names and list entries out of one file; all else stays to the byte."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from composer_replication.records import Edit
from composer_replication.tasks.planning.edits import LINE_END, Lines, edited_text
from composer_replication.tasks.planning.source_file import Definition, Items
from composer_replication.tasks.syntax_trees import blocks_of, first_line, parsed

_CODING = re.compile(r"#!|#.*coding[:=]")
_COMMA = re.compile(r"[ \t\f]*,")
_List = ast.Import | ast.ImportFrom | Items


@dataclass(slots=True)
class FileCut:
    """What goes out of one file.

    ``items`` are the doomed names of an import, or elements of a literal list, by index, with the text that replaces
    each (None: nothing).
    """

    path: str
    lines: Lines
    tree: ast.Module
    statements: dict[int, ast.stmt] = field(default_factory=dict)
    items: dict[int, tuple[_List, dict[int, str | None]]] = field(default_factory=dict)

    def take_statement(self, node: ast.stmt) -> None:
        self.statements[id(node)] = node

    def take_item(self, node: _List, index: int, replacement: str | None = None) -> None:
        self.items.setdefault(id(node), (node, {}))[1][index] = replacement

    def gone_lines(self) -> set[int]:
        """The lines of the statements that go, decorators included."""
        gone: set[int] = set()
        for node in self.statements.values():
            gone.update(range(first_line(node), (node.end_lineno or node.lineno) + 1))
        return gone

    def edits(self) -> tuple[Edit, ...] | None:
        """The edits in order of place; None when what is left does not parse."""
        statements = dict(self.statements)
        spans: list[tuple[int, int, str]] = []
        for node, doomed in self.items.values():
            if not isinstance(node, Items) and len(doomed) == len(node.names) and not any(doomed.values()):
                statements[id(node)] = node
            elif id(node) not in statements:
                spans += _spans_of(self.lines, node, doomed)
        spans += _Rows(self.lines, self.tree, statements).spans()
        edits = [Edit(self.path, start, end, text) for start, end, text in spans]
        edits = _without_inner(sorted(set(edits), key=lambda edit: (edit.start, edit.end)))
        return tuple(edits) if parses_after(self.lines.text, edits) else None


def parses_after(text: str, edits: Sequence[Edit]) -> bool:
    """Whether a file still parses after its edits."""
    try:
        return parsed(edited_text(text, edits)) is not None
    except ValueError:  # edits that overlap
        return False


def _without_inner(edits: list[Edit]) -> list[Edit]:
    """Drop edits that lie inside a larger one (an import inside a function that goes)."""
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept


def _all_blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements below a node, outermost first."""
    for block in blocks_of(node):
        yield block
        for statement in block:
            yield from _all_blocks(statement)


class _Rows:
    """Whole-line removal of statements, with the comments right above definitions and spare blank lines."""

    def __init__(self, lines: Lines, tree: ast.Module, statements: Mapping[int, ast.stmt]) -> None:
        self._lines = lines
        self._count = len(lines.starts)
        self._gone: dict[int, str] = {}
        self._inline: list[tuple[int, int, str]] = []
        for block in _all_blocks(tree):
            doomed = [node for node in block if id(node) in statements]
            is_all = len(doomed) == len(block) and block is not tree.body
            for position, node in enumerate(doomed):
                self._take(node, leaves_pass=is_all and position == 0)

    def _take(self, node: ast.stmt, *, leaves_pass: bool) -> None:
        first, last = first_line(node), node.end_lineno or node.lineno
        if any(number in self._gone for number in range(first, last + 1)):
            return
        lines = self._lines
        start, end = lines.span(node)
        margin = lines.text[lines.starts[node.lineno - 1] : start]
        if margin.strip() or not lines.ends_line(node):
            self._inline.append((start, end, "pass"))
            return
        if isinstance(node, Definition | ast.Assign | ast.AnnAssign):
            first = self._with_comments(first, margin)
        for number in range(first, last + 1):
            self._gone[number] = ""
        if leaves_pass:
            ending = LINE_END.search(lines.line(last))
            self._gone[first] = f"{margin}pass{ending[0] if ending else ''}"

    def _with_comments(self, first: int, margin: str) -> int:
        while first > 1 and first - 1 not in self._gone:
            above = self._lines.line(first - 1)
            stripped = above.lstrip(" \t\f")
            is_same = above[: len(above) - len(stripped)].lstrip("\f") == margin.lstrip("\f")
            if not stripped.startswith("#") or not is_same or (first <= 3 and _CODING.match(stripped)):
                break
            first -= 1
        return first

    def _is_blank(self, number: int) -> bool:
        return not self._lines.line(number).strip()

    def spans(self) -> list[tuple[int, int, str]]:
        found = list(self._inline)
        for first, last in self._runs():
            text = "".join(self._gone.get(number, "") for number in range(first, last + 1))
            begin, until = (first, last) if text else self._with_blanks(first, last)
            start = self._lines.starts[begin - 1]
            end = self._lines.starts[until] if until < self._count else len(self._lines.text)
            found.append((start, end, text))
        return found

    def _runs(self) -> list[tuple[int, int]]:
        """Maximal runs of lines that go; blank lines between two of them go along."""
        runs: list[tuple[int, int]] = []
        for number in sorted(self._gone):
            joins = runs and all(self._is_blank(between) for between in range(runs[-1][1] + 1, number))
            if joins and not (self._gone[number] and runs[-1][1] + 1 < number):
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        return runs

    def _with_blanks(self, first: int, last: int) -> tuple[int, int]:
        """Blank lines on both sides become those of the wider side; none at a file's or block's edge."""
        above, below = first, last
        while above > 1 and above - 1 not in self._gone and self._is_blank(above - 1):
            above -= 1
        while below < self._count and below + 1 not in self._gone and self._is_blank(below + 1):
            below += 1
        at_end = below >= self._count
        opens = above > 1 and self._indent(above - 1) < self._indent(first)
        if above == 1 or (opens and not at_end):
            return first, below
        if at_end:
            return above, last
        return (first, below) if first - above >= below - last else (above, last)

    def _indent(self, number: int) -> int:
        line = self._lines.line(number)
        return len(line) - len(line.lstrip())


def _spans_of(lines: Lines, node: _List, doomed: Mapping[int, str | None]) -> list[tuple[int, int, str]]:
    places = [lines.span(item) for item in (node.elts if isinstance(node, Items) else node.names)]
    start, end = lines.span(node)
    has_brackets = bool(set("([{").intersection(lines.text[start : places[0][0]]))
    if isinstance(node, ast.Tuple) and not has_brackets and len(doomed) == len(places):
        return [(start, end, "()")]
    found = [(*places[index], text) for index, text in doomed.items() if text]
    going = {index for index, text in doomed.items() if not text}
    found += _item_spans(lines.text, places, going, has_brackets=has_brackets)
    kept = [place for index, place in enumerate(places) if index not in doomed]
    is_tuple_of_one = isinstance(node, ast.Tuple) and len(kept) == 1
    return _with_comma(lines.text, found, kept[0][1]) if is_tuple_of_one else found


def _with_comma(text: str, spans: list[tuple[int, int, str]], end: int) -> list[tuple[int, int, str]]:
    """Keep a comma after the last element that a tuple has left."""
    comma = _COMMA.match(text, end)
    if comma and not any(first < comma.end() <= last for first, last, _ in spans):
        return spans
    if any(first == end for first, _, _ in spans):
        return [(first, last, "," if first == end else said) for first, last, said in spans]
    return [*spans, (end, end, ",")]


def _item_spans(
    text: str, places: Sequence[tuple[int, int]], doomed: set[int], *, has_brackets: bool
) -> list[tuple[int, int, str]]:
    """The spans that take items out of a comma-separated list, one for each run of doomed items."""
    found: list[tuple[int, int, str]] = []
    index = 0
    while index < len(places):
        if index not in doomed:
            index += 1
            continue
        stop = index
        while stop < len(places) and stop in doomed:
            stop += 1
        found += _run_spans(text, places, index, stop, has_brackets=has_brackets)
        index = stop
    return found


def _run_spans(
    text: str, places: Sequence[tuple[int, int]], index: int, stop: int, *, has_brackets: bool
) -> list[tuple[int, int, str]]:
    start, end = places[index][0], places[stop - 1][1]
    comma = _COMMA.match(text, end)
    line_start = max(text.rfind("\n", 0, start), text.rfind("\r", 0, start)) + 1
    ending = LINE_END.search(text, comma.end() if comma else end)
    line_end, after_line = ending.span() if ending else (len(text), len(text))
    rest = text[comma.end() if comma else end : line_end].strip()
    alone = not text[line_start:start].strip() and (not rest or rest.startswith("#"))
    previous = places[index - 1][1] if index else None
    following = places[stop][0] if stop < len(places) else None
    if has_brackets and alone:
        return [(line_start, after_line, "")]
    if following is not None and not LINE_END.search(text, end, following):
        return [(start, following, "")]
    if previous is not None and (not LINE_END.search(text, previous, start) or not has_brackets):
        return [(previous, end, "")]
    if following is not None:
        return [(start, following, "")]
    return [(start, comma.end() if comma else end, "")]
