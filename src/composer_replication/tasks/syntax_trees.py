"""``ast.parse`` that threads may call at the same time, and what is asked of trees everywhere."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from threading import RLock

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_ONE_AT_A_TIME = RLock()  # a finalizer may parse, too
# What Python 3.12 thinks of an escape in somebody's code is no news to whoever builds tasks of it.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")


def parse_syntax(text: str | bytes) -> ast.Module:
    """The syntax tree of a text, as ``ast.parse`` gives it, with its errors (``UNPARSABLE``).

    Up to Python 3.11.7 and 3.12.1 all threads share one counter of depth: where two parse at the same time and
    garbage is collected meanwhile, either can end with a SystemError (CPython issue 106905).
    """
    with _ONE_AT_A_TIME:
        return ast.parse(text)  # noqa: TID251  the one place


def parsed(text: str | bytes) -> ast.Module | None:
    """The syntax tree of a file; None when it has none."""
    try:
        return parse_syntax(text)
    except UNPARSABLE:
        return None


def parsed_part(text: str) -> ast.Module | None:
    """As ``parsed``, also of a function that was cut out of its class, with its margin."""
    return parsed(f"if 1:\n{text}" if text[:1] in (" ", "\t") else text)


def docstring_of(body: list[ast.stmt]) -> ast.Expr | None:
    """The statement that is the docstring of a module, class or function with this body."""
    match body:
        case [ast.Expr(value=ast.Constant(value=str())) as first, *_]:
            return first
    return None


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements right inside a node, in the order of the text but for handlers, which come last."""
    arms = [*getattr(node, "handlers", []), *getattr(node, "cases", [])]
    blocks = [getattr(node, part, None) for part in ("body", "orelse", "finalbody")]
    for block in [*blocks, *(arm.body for arm in arms)]:
        if isinstance(block, list) and block:  # the body of a lambda is none
            yield block


def definitions_in(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, Definition]]:
    """Functions, classes and, as ``Class.method``, methods, in the order of the text; nothing that lies in a function."""
    for node in body:
        name = owner
        if isinstance(node, Definition):
            name = f"{owner}.{node.name}" if owner else node.name
            yield name, node
        for block in () if isinstance(node, Function) else blocks_of(node):
            yield from definitions_in(block, name)


def first_line(node: ast.stmt) -> int:
    """The line of the first decorator, or of the statement."""
    lines: list[int] = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min([node.lineno, *lines])
