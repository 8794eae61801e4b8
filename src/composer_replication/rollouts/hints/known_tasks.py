"""What hints need to know of a task of a store, read once; and of its visible tests those that failed, with what they check."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from composer_replication.records import Outcome, Score, Task
from composer_replication.rollouts.hints.hint_context import FailedTest
from composer_replication.tasks.instructions.writing import read_material
from composer_replication.tasks.instructions.written_instructions import read_secrets, secret_shown
from composer_replication.tasks.store import TaskStore
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
    symbol = task.symbol.rpartition(".")[2]
    found = [FailedTest(node_id, assertion_of(node_id, sources, places, about=symbol)) for node_id in failed]
    found.sort(key=lambda test: (not _names(test.assertion, symbol), not test.assertion, len(test.assertion)))
    return tuple(_one_of_each_first(found))


def assertion_of(
    node_id: str, sources: Sources, places: Mapping[str, Place] | None = None, *, about: str = ""
) -> str:
    """The first assertions of a test function, those about a name before others.

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
    return "; ".join(([text for text in wanted if len(text) <= SHORT_ASSERTION] or wanted)[:MAX_ASSERTIONS])


def _one_of_each_first(tests: Iterable[FailedTest]) -> list[FailedTest]:
    """What repeats another test's words comes last."""
    first: dict[str, FailedTest] = {}
    rest = []
    for test in tests:
        told = test.assertion or test.node_id.partition("[")[0]
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


@dataclass(frozen=True, slots=True)
class KnownTask:
    """A task, its first prompt, the paths of its tree and its visible tests; ``secrets`` are only asked about."""

    task: Task
    prompt: str
    tree: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    places: Mapping[str, Place]
    secrets: Any

    def failed_tests(self, score: Score | None) -> tuple[FailedTest, ...]:
        """The visible tests that failed, the most telling first."""
        return failed_tests(self.task, score, self.sources, self.places)

    def is_leak(self, text: str) -> bool:
        """Whether a text shows deleted code, a hidden test or a hidden value."""
        return bool(secret_shown(text, self.secrets))


class KnownTasks:
    """Hidden tests and the deleted code are looked at only to refuse a hint that shows them.

    Args:
        store: has the tasks.
        prompt_of: what a policy is told first.

    Raises (when called):
        InputError: no such task, or the store is damaged (CR0411, CR0412).
    """

    def __init__(self, store: TaskStore, prompt_of: Callable[[Task], str]) -> None:
        self.store = store
        self._prompt_of = prompt_of
        self._known: dict[str, KnownTask] = {}

    def __call__(self, task_id: str) -> KnownTask:
        if task_id not in self._known:
            store, task = self.store, self.store.get(task_id)
            places = store.repository(store.record(task_id).repository_record).places
            prompt = self._prompt_of(task)
            self._known[task_id] = KnownTask(
                task,
                prompt,
                tuple(sorted(store.files(task, "rollout"))),
                read_material(store, task).sources,
                {test: places[test] for test in task.tests.shown if test in places},
                read_secrets(store, task, prompt),
            )
        return self._known[task_id]
