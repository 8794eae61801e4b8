"""Copies of a test function under another name: as it is, or with one assertion that cannot hold."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import parse_syntax

MAX_SITES = 3
"""Assertions of one test that a contrary may change; the first ones."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Place:
    """A test function in its file: ``start`` to ``end`` are whole lines."""

    node: _Function
    start: int
    end: int


class SourceOfTests:
    """One file of tests and the functions in it that stand on lines of their own."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = Lines(text)
        self.module = parse_syntax(text)

    def place(self, names: Sequence[str]) -> Place | None:
        """A function by its qualified name; None where there is not exactly one that can be copied."""
        block: ast.Module | ast.ClassDef = self.module
        for name in names[:-1]:
            inner = [node for node in block.body if isinstance(node, ast.ClassDef) and node.name == name]
            if len(inner) != 1:
                return None
            block = inner[0]
        found = [node for node in block.body if isinstance(node, _Function) and node.name == names[-1]]
        if len(found) != 1 or (last := found[0].end_lineno) is None:
            return None
        node = found[0]
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        start, end = self.lines.starts[first - 1], self.lines.end_of_line(last)
        after = self.text[self.lines.offset(last, node.end_col_offset or 0) : end].strip()
        shares = any(other is not node and other.lineno <= last and (other.end_lineno or 0) >= first
                     for other in block.body)  # fmt: skip
        if shares or (after and not after.startswith("#")):
            return None
        return Place(node, start, end)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a piece of the text begins and ends."""
        return (
            self.lines.offset(node.lineno, node.col_offset),
            self.lines.offset(node.end_lineno or node.lineno, node.end_col_offset or 0),
        )

    def name_span(self, node: _Function) -> tuple[int, int]:
        """Where the name of a function stands."""
        start = self.lines.offset(node.lineno, node.col_offset)
        found = re.compile(r"(?:async\s+)?def\s+").match(self.text, start)
        after = found.end() if found else start
        return after, after + len(node.name)

    def copy(self, place: Place, name: str, kind: str, site: int, draw: random.Random) -> str | None:
        """The text of a copy under another name; None where it cannot be made.

        Args:
            place: of the function.
            name: of the copy.
            kind: "double" for the same text, "contrary" for one that cannot pass.
            site: which of ``sites_of`` a contrary changes; -1 adds an assertion at its end.
            draw: for the other value.
        """
        edits = [(*self.name_span(place.node), name)]
        tail = ""
        if kind == "contrary" and site >= 0:
            edits.append(self._contradict(place.node, sites_of(place.node)[site], draw))
        elif kind == "contrary":
            first = place.node.body[0]
            margin = self.text[self.lines.starts[first.lineno - 1] : self.span(first)[0]]
            if margin.strip() or first.lineno == place.node.lineno:
                return None
            tail = f"\n{margin}assert {draw.randrange(10**6)} == {draw.randrange(10**6, 10**7)}"
        text = self.text[place.start : place.end]
        for start, end, new in sorted(edits, reverse=True):
            text = text[: start - place.start] + new + text[end - place.start :]
        return text + tail

    def _contradict(self, function: _Function, site: ast.stmt, draw: random.Random) -> tuple[int, int, str]:
        """An edit after which an assertion that holds cannot hold."""
        test, pair = _judged(site)
        if pair is None:
            start, end = self.span(test)
            return start, end, f"(not ({self.text[start:end]}))"
        chosen = _value_of(function, pair)
        if chosen is None:
            start, end = self.span(pair[1])
            return start, end, f"(({self.text[start:end]}), {draw.randrange(10**6, 10**9)})"
        if isinstance(chosen, ast.Name):
            start, _ = self.span(site)
            return start, start, f"{chosen.id} = {_other('', draw)}; "
        leaves = [node for node in ast.walk(chosen) if isinstance(node, ast.Constant)]
        leaf = draw.choice(leaves) if leaves else None
        start, end = self.span(leaf or chosen)
        return start, end, _other(leaf and leaf.value, draw)


def functions_by_file(node_ids: Sequence[str]) -> dict[str, dict[tuple[str, ...], list[str]]]:
    """Node ids by file and by the qualified name of their function."""
    found: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for node_id in node_ids:
        path, *names = node_id.partition("[")[0].split("::")
        found.setdefault(path, {}).setdefault(tuple(names), []).append(node_id)
    return found


def read_tests(files: Mapping[str, bytes], path: str) -> SourceOfTests | None:
    """A test file, or None where it cannot be read as UTF-8 Python."""
    try:
        return SourceOfTests(
            files[path].decode("utf-8-sig" if files[path][:3] == b"\xef\xbb\xbf" else "utf-8")
        )
    except (KeyError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def sites_of(function: _Function) -> list[ast.stmt]:
    """The assertions that a contrary may change, in the order of the text."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and _judges(node)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))[:MAX_SITES]


def _judges(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    call = node.value
    wanted = {"assertEqual": 2, "assertTrue": 1, "assertFalse": 1}
    return (
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "self"
        and len(call.args) == wanted.get(call.func.attr, -1)  # any other method is no assertion of ours
        and not any(isinstance(argument, ast.Starred) for argument in call.args)
    )


def _judged(site: ast.stmt) -> tuple[ast.expr, tuple[ast.expr, ast.expr] | None]:
    """What an assertion judges, and the two sides where it says that they are equal."""
    if isinstance(site, ast.Assert):
        return site.test, _equality(site.test)
    assert isinstance(site, ast.Expr)
    assert isinstance(site.value, ast.Call)
    first, *others = site.value.args
    return first, (first, others[0]) if others else None


def _value_of(function: _Function, pair: tuple[ast.expr, ast.expr]) -> ast.expr | None:
    """The side of an equality that is written out, or is an argument of the test; None where there is none."""
    names = {argument.arg for argument in function.args.args} - {"self"}
    sides = (pair[1], pair[0])
    literal = next((side for side in sides if _is_literal(side)), None)
    return literal or next((side for side in sides if isinstance(side, ast.Name) and side.id in names), None)


def has_value(function: _Function, site: ast.stmt) -> bool:
    """Whether a contrary of this assertion expects another value, and not just the opposite."""
    pair = _judged(site)[1]
    return pair is not None and _value_of(function, pair) is not None


def _equality(test: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    is_one = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
    return (test.left, test.comparators[0]) if is_one and isinstance(test, ast.Compare) else None


def _is_literal(node: ast.expr) -> bool:
    """Whether an expression is written out in full."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_literal(node.operand)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(_is_literal(each) for each in node.elts)
    if isinstance(node, ast.Dict):
        return all(each is not None and _is_literal(each) for each in (*node.keys, *node.values))
    return False


def _other(value: object, draw: random.Random) -> str:
    """A literal that nothing equals by chance, of the type of a value where that is easy."""
    number = draw.randrange(10**6, 10**9)
    if isinstance(value, str):
        return repr(f"x{number:x}")
    if isinstance(value, bytes):
        return repr(b"x%x" % number)
    return f"{number}.5" if isinstance(value, float) else str(number)
