"""What hints need to know of a task of a store, read once; and of its visible tests those that failed, with what they check."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Mapping
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
_FAILED = {Outcome.FAILED, Outcome.ERROR, Outcome.MISSING}


@dataclass(frozen=True, slots=True)
class KnownTask:
    """A task, its first prompt and its visible tests (path and source of each function); ``secrets`` are only asked about.

    ``places`` say where the function of a node id stands, if that is not what the node id says.
    """

    task: Task
    prompt: str
    sources: tuple[tuple[str, str], ...]
    places: Mapping[str, Place]
    secrets: Any

    def failed_tests(self, score: Score | None) -> tuple[FailedTest, ...]:
        """The visible tests that failed, those with a known assertion first; of tests that check the same in words, as
        the cases of a parametrised function do, the first. Outcomes of other tests are never looked at.
        """
        outcomes = {} if score is None else score.outcomes
        found: dict[str, FailedTest] = {}
        for node_id in self.task.tests.shown:
            if outcomes.get(node_id) in _FAILED:
                assertion = self.assertion_of(node_id)
                found.setdefault(assertion or node_id.partition("[")[0], FailedTest(node_id, assertion))
        return tuple(sorted(found.values(), key=lambda test: not test.assertion))

    def assertion_of(self, node_id: str) -> str:
        """The first assertions of a test function; empty where its source is not known for sure."""
        path, _, name = node_id.partition("[")[0].partition("::")
        name = name.rpartition("::")[2]
        if node_id in self.places:
            path, _, name = self.places[node_id]
        sources = [source for source_path, source in self.sources if source_path == path]
        functions = [each for each in map(_function, sources) if each is not None and each.name == name]
        if len(functions) != 1:
            return ""
        nodes = sorted(
            (node for node in ast.walk(functions[0]) if _is_assertion(node)), key=lambda node: node.lineno
        )
        return "; ".join(map(_text, nodes[:MAX_ASSERTIONS]))

    def is_leak(self, text: str) -> bool:
        """Whether a text shows deleted code, a hidden test or a hidden value."""
        return bool(secret_shown(text, self.secrets))


def _function(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    try:
        body = parse_syntax(textwrap.dedent(source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    first = body[0] if body else None
    return first if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _is_assertion(node: ast.AST) -> TypeGuard[ast.stmt]:
    """``assert``, ``self.assertEqual(...)``, or ``with pytest.raises(...)`` with what stands in it."""
    if isinstance(node, ast.With | ast.AsyncWith):
        return any(_called(item.context_expr).startswith(("raises", "assert")) for item in node.items)
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Expr) and _called(node.value).startswith("assert")
    )


def _text(node: ast.stmt) -> str:
    return " ".join(ast.unparse(node.test if isinstance(node, ast.Assert) else node).split())


def _called(node: ast.expr) -> str:
    """The last name of what is called; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else str(getattr(function, "id", ""))


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
                read_material(store, task).sources,
                {test: places[test] for test in task.tests.shown if test in places},
                read_secrets(store, task, prompt),
            )
        return self._known[task_id]
