"""What is known of a single-turn rollout on a task of a store: prompt, answered file, failing visible tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from composer_replication.records import Rollout, Score, StopReason, Task, Turn
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.hints.failing_tests import failed_tests, told_first
from composer_replication.rollouts.hints.hint_context import FailedTest, ObservedRollout, ObservedTurn
from composer_replication.rollouts.hints.hint_prompts import Chat
from composer_replication.rollouts.single_turn import build_prompt, extract_answer, is_finished
from composer_replication.tasks.instructions.writing import read_material
from composer_replication.tasks.instructions.written_instructions import read_secrets, secret_shown
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_functions import Place


@dataclass(frozen=True, slots=True)
class _Known:
    """Of one task, read once."""

    task: Task
    broken: str
    prompt: str
    tree: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    places: Mapping[str, Place]
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
            failed_tests=failed_tests(known.task, rollout.score, known.sources, known.places),
            is_leak=lambda text: bool(secret_shown(text, known.secrets)),
        )

    def tests_of(self, task_id: str) -> tuple[FailedTest, ...]:
        """All visible tests of a task as if they had failed, the most telling first.

        Raises:
            InputError: no such task, or the store is damaged (CR0411, CR0412).
        """
        known = self._read(task_id)
        return told_first(known.task, known.task.tests.visible, known.sources, known.places)

    def is_secret(self, task_id: str, text: str) -> bool:
        """Whether a text shows what must stay hidden of a task.

        Raises:
            InputError: no such task, or the store is damaged (CR0411, CR0412).
        """
        return bool(secret_shown(text, self._read(task_id).secrets))

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
            places = self.store.repository(self.store.record(task_id).repository_record).places
            prompt = build_prompt(
                broken, task.hole, style=self.prompt_style, context_lines=self.context_lines
            )
            self._known[task_id] = _Known(
                task,
                broken,
                prompt,
                tuple(sorted(self.store.files(task, "rollout"))),
                read_material(self.store, task).sources,
                {test: places[test] for test in task.tests.visible if test in places},
                read_secrets(self.store, task, prompt),
            )
        return self._known[task_id]
