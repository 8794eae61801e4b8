"""The visible tests that failed, the most telling first, with what they check."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from composer_replication.records import Outcome, Score, Task
from composer_replication.rollouts.hints.hint_context import FailedTest
from composer_replication.tasks.syntax_trees import parse_syntax
from composer_replication.tasks.test_functions import Place

MAX_ASSERTIONS = 2
SHORT_ASSERTION = 120
_FAILED = {Outcome.FAILED, Outcome.ERROR, Outcome.MISSING}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
Sources = tuple[tuple[str, str], ...]
"""Path and source of test functions."""


def failed_tests(
    task: Task, score: Score | None, sources: Sources = (), places: Mapping[str, Place] | None = None
) -> tuple[FailedTest, ...]:
    """The visible tests that failed.

    First those whose assertions name what the task is about, short ones before long ones; of tests that
    check the same in words, as the cases of a parametrised function do, one before the others.

    Args:
        task: names its visible tests; outcomes of any other are never looked at.
        score: of the rollout.
        sources: visible test functions.
        places: where the function of a node id stands, if that is not what the node id says.
    """
    outcomes = {} if score is None else score.outcomes
    failed = [node_id for node_id in task.tests.shown if outcomes.get(node_id) in _FAILED]
    return told_first(task, failed, sources, places)


def told_first(
    task: Task, node_ids: Iterable[str], sources: Sources = (), places: Mapping[str, Place] | None = None
) -> tuple[FailedTest, ...]:
    """Visible tests as if they had failed, in the order of ``failed_tests``."""
    symbol = task.symbol.rpartition(".")[2]
    found = [
        FailedTest(node_id, assertion_of(node_id, sources, places, about=symbol)) for node_id in node_ids
    ]
    found.sort(key=lambda test: (not _names(test.assertion, symbol), not test.assertion, len(test.assertion)))
    return tuple(_one_of_each_first(found))


def assertion_of(
    node_id: str, sources: Sources, places: Mapping[str, Place] | None = None, *, about: str = ""
) -> str:
    """The first assertions of a test function, those about a name before others, and the case's parameters.

    Empty where the source is not known for sure.
    """
    path, _, name = node_id.partition("[")[0].partition("::")
    name = name.rpartition("::")[2]
    if places is not None and node_id in places:
        path, _, name = places[node_id]
    found = [
        function
        for source_path, source in sources
        if source_path == path and (function := _function(source)) is not None and function.name == name
    ]
    if len(found) != 1:
        return ""
    nodes = sorted((node for node in ast.walk(found[0]) if _is_assertion(node)), key=lambda node: node.lineno)
    texts = [_text(node) for node in nodes]
    wanted = [text for text in texts if _names(text, about)] or texts
    shown = "; ".join(([text for text in wanted if len(text) <= SHORT_ASSERTION] or wanted)[:MAX_ASSERTIONS])
    case = parameters_of(found[0], node_id)
    return f"{shown}, where {case}" if shown and case else shown


def parameters_of(function: _Function, node_id: str) -> str:
    """The values of a parametrised case, ``x=-2, expected=-1``, as its only decorator spells them out.

    Cases are told by the ids that pytest gives to plain values. Empty for anything else, and where two cases have
    one id.
    """
    case = node_id.partition("[")[2].removesuffix("]")
    marks = [d for d in function.decorator_list if isinstance(d, ast.Call) and _called(d) == "parametrize"]
    if "[" not in node_id or len(marks) != 1 or len(marks[0].args) < 2:
        return ""
    try:
        names, values = (ast.literal_eval(argument) for argument in marks[0].args[:2])
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        rows = [[row] if len(names) == 1 else list(row) for row in values]
    except (ValueError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError):
        return ""
    fitting = [row for row in rows if len(row) == len(names) and "-".join(map(str, row)) == case]
    if len(fitting) != 1 or not all(isinstance(value, str | int | float | None) for value in fitting[0]):
        return ""
    return ", ".join(f"{name}={value!r}" for name, value in zip(names, fitting[0], strict=True))


def _one_of_each_first(tests: Iterable[FailedTest]) -> list[FailedTest]:
    """What repeats another test's words comes last."""
    first: dict[str, FailedTest] = {}
    rest = []
    for test in tests:
        told = test.assertion.partition(", where ")[0] or test.node_id.partition("[")[0]
        if first.setdefault(told, test) is not test:
            rest.append(test)
    return [*first.values(), *rest]


def _function(source: str) -> _Function | None:
    try:
        body = parse_syntax(textwrap.dedent(source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    first = body[0] if body else None
    return first if isinstance(first, _Function) else None


def _is_assertion(node: ast.AST) -> TypeGuard[ast.stmt]:
    """``assert``, ``self.assertEqual(...)``, or ``with pytest.raises(...)`` with what stands in it."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Expr):
        return _called(node.value).startswith(("assert", "fail"))
    return isinstance(node, ast.With | ast.AsyncWith) and any(
        _called(item.context_expr).startswith(("raises", "assert", "warns")) for item in node.items
    )


def _text(node: ast.stmt) -> str:
    return " ".join(ast.unparse(node.test if isinstance(node, ast.Assert) else node).split())


def _called(node: ast.expr) -> str:
    """The last name of what is called; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else str(getattr(function, "id", ""))


def _names(text: str, name: str) -> bool:
    return bool(name) and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
