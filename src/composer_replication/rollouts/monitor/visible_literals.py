"""The literals of the visible tests: which values stand together in one test."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from composer_replication.rollouts.monitor.python_code import parse_python

_DEEPEST = 12
Known = Mapping[str, frozenset[int]]
"""For each literal, in its canonical text, the tests (by number) that it stands in."""


def canonical(node: ast.AST | None, depth: int = 0) -> str | None:
    """One text for equal literals: ``(1, 'a')`` and ``[1, "a"]`` are ``(1,'a')``, a dictionary ``{1:'a'}``; None where it is no literal."""
    if node is None or depth > _DEEPEST:
        return None
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
            value = int(value)
        return repr(value)[:2000]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = canonical(node.operand, depth + 1)
        return f"-{inner}" if inner is not None else None
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return _joined("(", [canonical(each, depth + 1) for each in node.elts], ")")
    if isinstance(node, ast.Dict):
        pairs = [
            (canonical(key, depth + 1), canonical(value, depth + 1))
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return _joined("{", [f"{key}:{value}" if key and value else None for key, value in pairs], "}")
    return None


def _joined(opening: str, parts: Sequence[str | None], closing: str) -> str | None:
    if any(part is None for part in parts):
        return None
    return f"{opening}{','.join(part for part in parts if part is not None)}{closing}"[:4000]


def is_telling(text: str) -> bool:
    """Whether a literal says something: no small number, no truth value, no text of one or two letters, nothing empty."""
    if text in ("True", "False", "None", "()", "{}", "''", '""', "b''"):
        return False
    if text[:1] in "'\"":
        return len(text) > 4
    if text[:1] in "({":
        return len(text) > 4
    try:
        return abs(float(text)) > 12 or float(text) != int(float(text))
    except (ValueError, OverflowError):
        return len(text) > 4


def visible_literals(texts: Mapping[str, str], visible: Sequence[str]) -> Known:
    """The literals of the visible tests.

    Args:
        texts: test files by path.
        visible: node ids; functions that none of them names are left out, unless no function is named at all.
    """
    wanted: dict[str, set[str]] = {}
    for node_id in visible:
        path, _, rest = node_id.partition("::")
        wanted.setdefault(path, set()).add(rest.partition("[")[0].rpartition("::")[2])
    found: dict[str, set[int]] = {}
    number = 0
    for path in sorted(texts):
        code = parse_python(texts[path])
        if code is None:
            continue
        functions = [
            node for node in ast.walk(code.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        named = [node for node in functions if node.name in wanted.get(path, ())]
        for function in named or (functions if not visible else ()):
            for group in _groups(function):
                number += 1
                for text in group:
                    found.setdefault(text, set()).add(number)
    return {text: frozenset(tests) for text, tests in found.items()}


def _groups(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[set[str]]:
    """Literals that stand together: in one case of a parametrised test, or in the body."""
    for decorator in function.decorator_list:
        for call in ast.walk(decorator):
            if (
                isinstance(call, ast.Call)
                and len(call.args) > 1
                and isinstance(call.args[1], ast.List | ast.Tuple)
            ):
                for case in call.args[1].elts:
                    yield _literals(case)
    simple: set[str] = set()
    for statement in function.body:
        simple |= _literals(statement)
    yield simple


def _literals(tree: ast.AST) -> set[str]:
    found = (canonical(node) for node in ast.walk(tree) if isinstance(node, ast.expr))
    return {text for text in found if text is not None}
