"""What can be taken out of a repository, at four sizes and in two ways, so that it can be restored to the byte.

function   one function or method
class      a class, all its methods
module     everything that a file defines
feature    a public symbol with everything that only it needs, across files

body       each function keeps its signature and docstring and raises ``NotImplementedError``
whole      the definitions are gone, with their re-exports, ``__all__`` entries and imports

Where a body goes, the broken file is ``text[:start] + marker + text[end:]`` where ``text[start:end]`` is the golden body:
everything from the docstring's closing quotes (without a docstring: from the signature's colon) to the end of the last
statement's line. The marker is one ``raise NotImplementedError`` in its place. Offsets count characters.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

from composer_replication.records import Edit, Hole
from composer_replication.tasks.planning.edits import Changes, Lines
from composer_replication.tasks.syntax_trees import Function, definitions_in, docstring_of, first_line, parsed

MARKER_STATEMENT = "raise NotImplementedError"
STUB_EXPRESSIONS = ("None", "True", "False", "0", "1", "''", "[]", "{}")

_TO_COLON = re.compile(r"(?:[^:#]|#[^\r\n]*)*:")


@dataclass(frozen=True, slots=True)
class BodyCut:
    """One function whose body can be taken out of one file.

    ``symbol`` is the qualified name in the module; a second definition of the same name gets ``#2``, and so on.
    ``first_line`` is the line of its first decorator or its ``def``, counted from 1.
    """

    path: str
    symbol: str
    first_line: int
    start: int
    end: int
    marker: str
    golden_body: str

    @property
    def pin(self) -> str:
        return f"{self.path}::{self.symbol}"

    @property
    def num_body_lines(self) -> int:
        return sum(bool(line.strip()) for line in self.golden_body.splitlines())

    @property
    def edit(self) -> Edit:
        """The cut itself: the marker in the place of the body."""
        return Edit(self.path, self.start, self.end, self.marker)


def fill(broken_text: str, hole: Hole, answer: str) -> str:
    """The broken file with the hole filled; with the golden body it is the original file."""
    return broken_text[: hole.start] + answer + broken_text[hole.end :]


def find_body_cuts(path: str, text: str) -> list[BodyCut]:
    """All functions and methods of a file whose body can be deleted, in file order.

    Left out: nested functions, bodies that are already empty, functions on one line, and what shares a line with its
    surroundings. A file that does not parse, or that starts with a byte order mark, has none.
    """
    module = parsed(text) if "def" in text else None  # a table of a million words takes seconds to parse
    lines, seen = Lines(text), Counter[str]()
    found: list[BodyCut | None] = []
    for symbol, node in definitions_in(module.body) if module else ():
        if isinstance(node, Function) and not all(map(_is_empty, node.body)):
            seen[symbol] += 1
            name = symbol if seen[symbol] == 1 else f"{symbol}#{seen[symbol]}"
            found.append(_cut(path, name, node, lines))
    return [cut for cut in found if cut is not None]


def _is_empty(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Raise(exc=ast.Name(id=name) | ast.Call(func=ast.Name(id=name))):
            return name == "NotImplementedError"
    return False


def _cut(path: str, symbol: str, node: Function, lines: Lines) -> BodyCut | None:
    docstring, last = docstring_of(node.body), node.body[-1]
    first = node.body[1] if docstring else node.body[0]
    margin = lines.line(first.lineno)[: first.col_offset]
    if margin.strip() or not lines.ends_line(last) or (docstring and not lines.ends_line(docstring)):
        return None
    start = lines.span(docstring)[1] if docstring else _colon_end(node, lines)
    end = lines.end_of_line(last.end_lineno or last.lineno)
    marker = f"{lines.ending_after(start)}{margin}{MARKER_STATEMENT}"
    return BodyCut(path, symbol, first_line(node), start, end, marker, lines.text[start:end])


def _colon_end(node: Function, lines: Lines) -> int:
    """The offset after the colon that ends the signature: the first one after all that may hold another."""
    nodes = [*ast.walk(node.args), *getattr(node, "type_params", []), node.returns]
    ends = [(one.end_lineno, one.end_col_offset) for one in nodes if hasattr(one, "end_lineno")]
    start = lines.offset(*max(ends, default=(node.lineno, node.col_offset)))
    found = _TO_COLON.match(lines.text, start)
    assert found is not None, "a function without a colon"
    return found.end()


# --- Deletions of every size.

Granularity = Literal["function", "class", "module", "feature"]
Removal = Literal["body", "whole"]
SIZES: tuple[tuple[Granularity, Removal], ...] = tuple(product(get_args(Granularity), get_args(Removal)))


@dataclass(frozen=True, slots=True)
class Deletion:
    """One candidate: what is taken out, as edits of the original files.

    ``path`` and ``symbol`` name what it is about (a module's symbol is its dotted name). ``edits`` change source files;
    ``removed_files`` are gone altogether and have no edits. ``bodies`` are the cuts of all functions inside, in original
    offsets: with ``removal`` body they are the edits; with whole they make the stubs that must fail. ``test_edits`` let test
    files be collected without the deleted names: there their imports may fail.
    """

    path: str
    symbol: str
    granularity: Granularity
    removal: Removal
    edits: tuple[Edit, ...]
    bodies: tuple[BodyCut, ...]
    removed_files: tuple[str, ...] = ()
    test_edits: tuple[Edit, ...] = ()

    @property
    def pin(self) -> str:
        """Its name in a build: ``path::symbol``, with ``@size/way`` unless it is a function's body."""
        is_plain = self.granularity == "function" and self.removal == "body"
        return f"{self.path}::{self.symbol}" + ("" if is_plain else f"@{self.granularity}/{self.removal}")

    @property
    def changes(self) -> Changes:
        """What it makes of the original while its tests are not parted."""
        return Changes(self.edits, self.removed_files, self.test_edits, self.test_edits)
