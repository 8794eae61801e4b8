"""What is known of a single-turn rollout on a task of a store: prompt, answered file, failing visible tests."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeGuard

from composer_replication.records import Outcome, Rollout, Score, StopReason, Task, Turn
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.hints.hint_context import FailedTest, ObservedRollout, ObservedTurn
from composer_replication.rollouts.hints.hint_prompts import Chat
from composer_replication.rollouts.single_turn import build_prompt, extract_answer, is_finished
from composer_replication.tasks.instructions.writing import read_material
from composer_replication.tasks.instructions.written_instructions import read_secrets, secret_shown
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.store import TaskStore

MAX_ASSERTIONS = 2
_FAILED = {Outcome.FAILED, Outcome.ERROR, Outcome.MISSING}


@dataclass(frozen=True, slots=True)
class _Known:
    """Of one task, read once."""

    task: Task
    broken: str
    prompt: str
    tree: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    secrets: Any


class TaskObserver:
    """Call it with a rollout on a one-hole task: ``HintedTurnMaker(tokenizer, observe=TaskObserver(store))``.

    The source of visible tests is read from the store; hidden tests and the deleted code are looked at only to
    refuse a hint that shows them.

    Args:
        store: has the tasks.
        grader: asked for the score of rollouts that have a reward and no score, as a trainer makes them. It
            is that of the reward, so the same answer is not run again. None: such rollouts have no finding.
        tests: those of the reward, ``visible`` or ``weakened``.
        prompt_style, context_lines: as the prompts were cut.
        template_options: further variables of the chat template.

    Raises (when called):
        InputError: no such task, or the store is damaged (CR0411, CR0412).
    """

    def __init__(
        self,
        store: TaskStore,
        *,
        grader: Grader | None = None,
        tests: Literal["visible", "weakened"] = "visible",
        prompt_style: str = "completion",
        context_lines: int = 12,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = store
        self.grader = grader
        self.tests: Literal["visible", "weakened"] = tests
        self.prompt_style = prompt_style
        self.context_lines = context_lines
        self.template_options = dict(template_options or {})
        self._known: dict[str, _Known] = {}

    def __call__(self, rollout: Rollout) -> ObservedRollout:
        if not rollout.turns:  # nothing was sampled
            return ObservedRollout(rollout, ())
        known = self._read(rollout.task_id)
        hole, last = known.task.hole, rollout.turns[-1]
        answer = extract_answer(last.completion.text, known.broken, hole, style=self.prompt_style)
        turn = self._turn(last, known)
        rollout = replace(rollout, turns=(turn,), score=self._score(rollout, known.task, answer))
        marker = known.broken[hole.start : hole.end].lstrip("\r\n")
        chat = None
        if self.prompt_style == "chat":
            chat = Chat([{"role": "user", "content": known.prompt}], options=self.template_options)
        return ObservedRollout(
            rollout,
            (ObservedTurn(turn, chat=chat),),
            tree=known.tree,
            path=hole.path,
            answer=answer,
            answered_text=fill(known.broken, hole, answer),
            indent=marker[: len(marker) - len(marker.lstrip(" \t"))] or None,
            failed_tests=failed_tests(known.task, known.sources, rollout.score),
            is_leak=lambda text: bool(secret_shown(text, known.secrets)),
        )

    def _turn(self, turn: Turn, known: _Known) -> Turn:
        """With the prompt's text, and told whether the stop rule ended it: a trainer sees ids only."""
        completion = turn.completion
        has_left_body = self.prompt_style == "completion" and is_finished(completion.text)
        if has_left_body and completion.stop_reason is StopReason.LENGTH:
            completion = replace(completion, stop_reason=StopReason.STOP_RULE)
        return replace(turn, prompt_text=turn.prompt_text or known.prompt, completion=completion)

    def _score(self, rollout: Rollout, task: Task, answer: str) -> Score | None:
        if rollout.score is not None or rollout.reward is None or self.grader is None:
            return rollout.score
        return self.grader.grade(task, answer, self.tests)

    def _read(self, task_id: str) -> _Known:
        if task_id not in self._known:
            task = self.store.get(task_id)
            broken = self.store.broken_text(task)
            prompt = build_prompt(
                broken, task.hole, style=self.prompt_style, context_lines=self.context_lines
            )
            self._known[task_id] = _Known(
                task,
                broken,
                prompt,
                tuple(sorted(self.store.files(task, "rollout"))),
                read_material(self.store, task).sources,
                read_secrets(self.store, task, prompt),
            )
        return self._known[task_id]


def failed_tests(
    task: Task, sources: tuple[tuple[str, str], ...], score: Score | None
) -> tuple[FailedTest, ...]:
    """The visible tests that failed, in the task's order, with the assertions of their source.

    Args:
        task: names its visible tests; outcomes of any other are never looked at.
        sources: path and source of visible test functions.
        score: of the rollout.
    """
    outcomes = {} if score is None else score.outcomes
    failed = [node_id for node_id in task.tests.visible if outcomes.get(node_id) in _FAILED]
    return tuple(FailedTest(node_id, assertion_of(node_id, sources)) for node_id in failed)


def assertion_of(node_id: str, sources: tuple[tuple[str, str], ...]) -> str:
    """The first assertions of a test function; empty where its source is not known for sure."""
    path, _, name = node_id.partition("[")[0].partition("::")
    name = name.rpartition("::")[2]
    found = [
        function
        for source_path, source in sources
        if source_path == path and (function := _function(source)) is not None and function.name == name
    ]
    if len(found) != 1:
        return ""
    asserted = sorted(
        (node for node in ast.walk(found[0]) if _is_assertion(node)), key=lambda node: node.lineno
    )
    shown = [node.test if isinstance(node, ast.Assert) else node for node in asserted[:MAX_ASSERTIONS]]
    return "; ".join(" ".join(ast.unparse(node).split()) for node in shown)


def _function(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    try:
        body = ast.parse(textwrap.dedent(source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    first = body[0] if body else None
    return first if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef) else None


def _is_assertion(node: ast.AST) -> TypeGuard[ast.stmt]:
    """``assert``, ``self.assertEqual(...)``, or ``with pytest.raises(...)`` with what stands in it."""
    if isinstance(node, ast.Assert):
        return True
    if isinstance(node, ast.Expr):
        return _called(node.value).startswith(("assert", "fail"))
    return isinstance(node, ast.With | ast.AsyncWith) and any(
        _called(item.context_expr).startswith(("raises", "assert", "warns")) for item in node.items
    )


def _called(node: ast.expr) -> str:
    """The last name of what is called; empty for anything else."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else str(getattr(function, "id", ""))
