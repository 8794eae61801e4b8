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
from functools import lru_cache
from itertools import islice

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
_Change = tuple[ast.stmt | ast.expr, str]
"""The node whose text is replaced, and the new text."""


def mutants_of(text: str, cut: BodyCut, *, max_mutants: int = 20) -> tuple[str, ...]:
    """Faulty bodies for the hole of a cut, in the order of the text; all can be compiled and differ from the golden one.

    Of more than ``max_mutants`` so many are drawn.
    """
    own = _function_at(text, cut).body
    lines = Lines(text)
    found: dict[str, None] = {}
    for place, new in _changes(own[1:] if docstring_of(own) else own):
        start, end = lines.span(place)
        if cut.start <= start <= end <= cut.end:
            found.setdefault(text[cut.start : start] + new + text[end : cut.end])
    found.pop(cut.golden_body, None)
    order = list(enumerate(found))
    random.Random(f"0/{cut.pin}").shuffle(order)  # noqa: S311  a sample, not a secret
    # Compiling is what takes the time: of hundreds only as many are compiled as are wanted.
    chosen = islice((pair for pair in order if _compiles(text, cut, pair[1])), max_mutants)
    return tuple(body for _, body in sorted(chosen))


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
    todo: list[ast.AST] = list(reversed(body))
    while todo:
        node = todo.pop()
        yield from _of_statement(node)
        yield from _of_expression(node)
        if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Constant):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        if isinstance(node, ast.JoinedStr):
            continue  # up to Python 3.11 the parts of an f-string have no place of their own
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = docstring_of(node.body)
            children = [child for child in children if child is not docstring]
        todo += reversed(children)


def _of_statement(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield node, "return None"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Assign() | ast.AnnAssign() | ast.Expr() | ast.Raise() | ast.Delete() | ast.Assert():
            yield node, "pass"
        case ast.AugAssign(op=operator):
            yield node, "pass"
            if type(operator) in _OPERATORS:
                yield node, _text(node, op=_OPERATORS[type(operator)]())


def _of_expression(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.BinOp(op=operator) if type(operator) in _OPERATORS:
            yield node, f"({_text(node, op=_OPERATORS[type(operator)]())})"
        case ast.Compare(ops=operators):
            for place, compared in enumerate(operators):
                others = [*operators[:place], _COMPARISONS[type(compared)](), *operators[place + 1 :]]
                yield node, f"({_text(node, ops=others)})"
        case ast.BoolOp(op=joined):
            yield node, f"({_text(node, op=ast.Or() if isinstance(joined, ast.And) else ast.And())})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, repr(value + 1)
        case ast.Constant(value=str(value)):
            yield node, repr(f"XX{value}")


def _text(node: ast.AST, **changed: object) -> str:
    """The text of a node with other fields."""
    other = copy.copy(node)
    for name, value in changed.items():
        setattr(other, name, value)
    return ast.unparse(other)
