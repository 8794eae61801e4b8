"""What is known of a single-turn rollout on a task of a store: prompt, answered file, failing visible tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from composer_replication.records import Rollout, Score, StopReason, Task, Turn
from composer_replication.rollouts.episodes.episode import ObservedTurn
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.hints.hint_context import ObservedRollout
from composer_replication.rollouts.hints.known_tasks import KnownTask, KnownTasks
from composer_replication.rollouts.single_turn import build_prompt, extract_answer, is_finished
from composer_replication.rollouts.tokens.chat import Chat
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.store import TaskStore


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
    ) -> None:
        self.store = store
        self.grader = grader
        self.tests: Literal["visible", "weakened"] = tests
        self.prompt_style = prompt_style
        self.context_lines = context_lines
        self.known = KnownTasks(store, self._prompt)

    def __call__(self, rollout: Rollout) -> ObservedRollout:
        if not rollout.turns:  # nothing was sampled
            return ObservedRollout(rollout, ())
        known = self.known(rollout.task_id)
        hole, last = known.task.hole, rollout.turns[-1]
        broken = self.store.broken_text(known.task)
        answer = extract_answer(last.completion.text, broken, hole, style=self.prompt_style)
        turn = self._turn(last, known)
        rollout = replace(rollout, turns=(turn,), score=self._score(rollout, known.task, answer))
        marker = broken[hole.start : hole.end].lstrip("\r\n")
        chat = None
        if self.prompt_style == "chat":
            chat = Chat([{"role": "user", "content": known.prompt}])
        return ObservedRollout(
            rollout,
            (ObservedTurn(turn, chat=chat),),
            path=hole.path,
            answer=answer,
            answered_text=fill(broken, hole, answer),
            indent=marker[: len(marker) - len(marker.lstrip(" \t"))],
            failed_tests=known.failed_tests(rollout.score),
            is_leak=known.is_leak,
        )

    def _prompt(self, task: Task) -> str:
        return build_prompt(
            self.store.broken_text(task),
            task.hole,
            style=self.prompt_style,
            context_lines=self.context_lines,
        )

    def _turn(self, turn: Turn, known: KnownTask) -> Turn:
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
