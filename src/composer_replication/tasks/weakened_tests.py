"""Tests that call and no longer judge: the defect of a real suite, planted on purpose.

Used as an in-loop reward to see the guard at work; hidden tests are never weakened.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from composer_replication.tasks.planning.edits import Lines
from composer_replication.tasks.syntax_trees import parse_syntax

_TARGET = "_ ="


def without_assertions(text: str) -> str:
    """The file with every assertion evaluated and its result thrown away.

    ``assert x == y, why`` becomes ``_ =    x == y, why`` and ``self.assertEqual(x, y)`` becomes
    ``_ =             (x, y)``: same lines, same columns, still an error where evaluating raises.
    Left as they are: ``pytest.raises`` and other blocks, calls with keywords or stars, and
    files that Python cannot read.
    """
    try:
        module = parse_syntax(text)
    except (SyntaxError, ValueError):
        return text
    lines = Lines(text)
    pieces = list(text)
    for node, length in _assertions(module):
        start = lines.offset(node.lineno, node.col_offset)
        pieces[start : start + length] = _TARGET.ljust(length)
    weaker = "".join(pieces)
    try:
        parse_syntax(weaker)
    except SyntaxError:  # an assertion written over a line break in the middle of its name, say
        return text
    return weaker


def _assertions(module: ast.Module) -> Iterable[tuple[ast.stmt, int]]:
    """Each statement to weaken and how many characters of it to write over."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assert):
            yield node, len("assert")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _judges(node.value):
            function = node.value.func
            if function.end_lineno == node.lineno and function.end_col_offset is not None:
                yield node, function.end_col_offset - function.col_offset


def _judges(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "self"
        and call.func.attr.startswith("assert")
        and not call.func.attr.startswith(("assertRaises", "assertWarns", "assertLogs", "assertNoLogs"))
        and bool(call.args)
        and not call.keywords
        and not any(isinstance(argument, ast.Starred) for argument in call.args)
    )
