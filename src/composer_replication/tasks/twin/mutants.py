"""How strong are the tests of a task? Put small faults into its golden body and count who notices.

Faults, one at a time: another comparison, another arithmetic operator, ``and`` for ``or``, a
constant one larger, another text, a ``not`` dropped or added, ``return None``, ``break`` for
``continue``, a statement deleted. Docstrings stay: deleting one changes nothing (DeMillo,
Lipton, Sayward, Hints on test data selection, 1978). Some faults change nothing either, so
no suite kills all.
"""

from __future__ import annotations

import ast
import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import itemgetter

from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import docstring_of, first_line, parse_syntax

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_DELETABLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Raise, ast.Delete, ast.Assert)
_Change = tuple[str, ast.stmt | ast.expr, str]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One faulty body: what was changed, in which line of the file, and the text for the hole."""

    operator: str
    line: int
    body: str


def mutants_of(text: str, cut: BodyCut, *, max_mutants: int = 20, seed: int = 0) -> tuple[Mutant, ...]:
    """Mutants of one golden body in the order of the text; all can be compiled and differ from it.

    Of more than ``max_mutants`` so many are drawn by the ``seed``.
    """
    own = _function_at(text, cut).body
    lines = Lines(text)
    found: dict[str, Mutant] = {}
    for operator, place, new in _changes(own[1:] if docstring_of(own) else own):
        start, end = lines.span(place)
        if not cut.start <= start <= end <= cut.end:
            continue
        body = text[cut.start : start] + new + text[end : cut.end]
        if body != cut.golden_body:
            found.setdefault(body, Mutant(operator, place.lineno, body))
    order = list(enumerate(found.values()))
    random.Random(f"{seed}/{cut.pin}").shuffle(order)  # noqa: S311  a sample, not a secret
    # Compiling is what takes the time: of hundreds only as many are compiled as are wanted.
    chosen = islice((pair for pair in order if _compiles(text, cut, pair[1].body)), max_mutants)
    return tuple(mutant for _, mutant in sorted(chosen, key=itemgetter(0)))


def _function_at(text: str, cut: BodyCut) -> ast.FunctionDef | ast.AsyncFunctionDef:
    name = cut.symbol.rpartition(".")[2].partition("#")[0]
    for node in _functions(text):
        if node.name == name and first_line(node) == cut.first_line:
            return node
    raise ValueError(f"{cut.pin} is not in the text")


@lru_cache(maxsize=16)
def _functions(text: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    """All functions of a file; nobody changes the nodes."""
    nodes = ast.walk(parse_syntax(text))
    return tuple(node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _compiles(text: str, cut: BodyCut, body: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            compile(text[: cut.start] + body + text[cut.end :], cut.path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError):
            return False
    return True


def _changes(body: Sequence[ast.stmt]) -> Iterator[_Change]:
    """All single changes: name, the node whose text is replaced, the new text."""
    todo: list[ast.AST] = list(reversed(body))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt):
            yield from _of_statement(node)
        elif isinstance(node, ast.expr):
            yield from _of_expression(node)
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
            yield "negated test", node.test, f"(not ({ast.unparse(node.test)}))"
        if isinstance(node, ast.JoinedStr):
            continue  # up to Python 3.11 the parts of an f-string have no place of their own
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = docstring_of(node.body)
            children = [child for child in children if child is not docstring]
        todo += reversed(children)


def _of_statement(node: ast.stmt) -> Iterator[_Change]:
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None", node, "return None"
    elif isinstance(node, ast.Break):
        yield "continue for break", node, "continue"
    elif isinstance(node, ast.Continue):
        yield "break for continue", node, "break"
    elif isinstance(node, _DELETABLE) and not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
        yield "statement deleted", node, "pass"
    if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
        other = copy.copy(node)
        other.op = _OPERATORS[type(node.op)]()
        yield "arithmetic", node, ast.unparse(other)


def _of_expression(node: ast.expr) -> Iterator[_Change]:
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            other = copy.copy(node)
            other.ops = [*node.ops[:place], _COMPARISONS[type(operator)](), *node.ops[place + 1 :]]
            yield "comparison", node, f"({ast.unparse(other)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        swapped = copy.copy(node)
        swapped.op = _OPERATORS[type(node.op)]()
        yield "arithmetic", node, f"({ast.unparse(swapped)})"
    elif isinstance(node, ast.BoolOp):
        joined = copy.copy(node)
        joined.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", node, f"({ast.unparse(joined)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "not" if isinstance(node.op, ast.Not) else "sign", node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield "constant", node, repr(not value)
        elif isinstance(value, int | float):
            yield "constant", node, repr(value + 1)
        elif isinstance(value, str):
            yield "string", node, repr(f"XX{value}")
