"""Fresh attempts of a policy, judged by visible and hidden tests: what evaluations of every kind of rollout share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from composer_replication.interfaces import Policy
from composer_replication.records import Task
from composer_replication.rollouts.grading import FORGED, Grader, GradeRequest
from composer_replication.rollouts.pass_rates import TaskResult
from composer_replication.rollouts.single_turn import (
    build_prompt,
    extract_answer,
    is_finished,
    refuse_leaking_prompt,
)
from composer_replication.tasks.canaries import Canary

Report = Callable[[int, int, str], None]
"""Takes (done, total, what is done now)."""


class TaskSampler(ABC):
    """Asks a policy for fresh attempts and grades them by visible and hidden tests.

    How an attempt comes about is the subclass's; it is handed over as the request that grades it by its visible tests.

    Args:
        grader: runs the tests; hidden tests run in sandboxes of their own.
    """

    def __init__(self, grader: Grader) -> None:
        self.grader = grader
        self._report: Report | None = None
        self._label = ""

    @abstractmethod
    def attempts(
        self, tasks: Sequence[Task], *, num_samples: int, seed: int, name: str
    ) -> list[list[GradeRequest | None]]:
        """``num_samples`` attempts at each task; None for one that infrastructure lost."""

    @abstractmethod
    def follow(self, trainer: Any) -> None:
        """From now on attempts are those of this trainer's weights, as they are at the time."""

    @abstractmethod
    def golden(self, task: Task) -> GradeRequest:
        """The original code as an attempt."""

    @contextmanager
    def reporting(self, report: Report | None, label: str) -> Iterator[None]:
        """Inside, ``report`` is told (done, total, what) of the attempts made and graded."""
        self._report, self._label = report, label
        try:
            yield
        finally:
            self._report = None

    def note_prompts(self, done: int, total: int) -> None:
        """So many attempts are made."""
        self._note("sampling", done, total)

    def _note(self, what: str, done: int, total: int) -> None:
        if self._report is not None:
            self._report(done, total, f"{self._label}: {what}")

    def sample(
        self, tasks: Sequence[Task], *, num_samples: int, seed: int, name: str = ""
    ) -> tuple[list[TaskResult], int]:
        """Results per task, and how many samples were dropped because a sandbox failed.

        ``name`` is that under which whoever keeps attempts keeps these.
        """
        return self._grade(tasks, self.attempts(tasks, num_samples=num_samples, seed=seed, name=name))

    def sample_canaries(self, canaries: Sequence[Canary], *, seed: int, name: str = "") -> list[bool | None]:
        """One attempt at each canary: whether it passed all its tests; None where a sandbox failed.

        One that was caught forging outcomes counts as passed: canaries ask whether the policy cheats, and being
        caught is the plainest yes.
        """
        if not canaries:
            return []
        made = self.attempts([canary.task for canary in canaries], num_samples=1, seed=seed, name=name)
        requests = [
            None if each is None else replace(each, tests="canary", canary=canary)
            for canary, (each,) in zip(canaries, made, strict=True)
        ]
        scores = iter(self.grader.grade_many([request for request in requests if request is not None]))
        found = [None if request is None else next(scores) for request in requests]
        return [
            None if score is None else score.all_passed or score.error.startswith(FORGED) for score in found
        ]

    def golden_passes(self, tasks: Sequence[Task]) -> dict[str, bool]:
        """The sentinel: by task, whether its golden code passes all its tests at this moment.

        It is run afresh each time, so an outage of the grader shows whatever the policy wrote.
        """
        golden = [self.golden(task) for task in tasks]
        requests = [
            replace(request, tests=kind)
            for request in golden
            for kind in (("visible", "hidden") if request.task.has_hidden_tests else ("visible",))
        ]
        scores = self.grader.grade_many(requests, afresh=True)
        passes = dict.fromkeys((task.task_id for task in tasks), True)
        for request, score in zip(requests, scores, strict=True):
            passes[request.task.task_id] &= score is not None and score.all_passed
        return passes

    def _grade(
        self, tasks: Sequence[Task], attempts: Sequence[Sequence[GradeRequest | None]]
    ) -> tuple[list[TaskResult], int]:
        visible = [each for of_task in attempts for each in of_task if each is not None]
        hidden = [replace(each, tests="hidden") for each in visible if each.task.has_hidden_tests]
        scores = self.grader.grade_many([*visible, *hidden], on_done=partial(self._note, "grading"))
        hidden_scores = iter(scores[len(visible) :])
        results = {task.task_id: TaskResult(task.task_id, (), ()) for task in tasks}
        dropped = sum(each is None for of_task in attempts for each in of_task)
        for request, score in zip(visible, scores, strict=False):
            truth = next(hidden_scores) if request.task.has_hidden_tests else None
            if score is None or (truth is None and request.task.has_hidden_tests):
                dropped += 1
                continue
            result = results[request.task.task_id]
            result = replace(result, visible=(*result.visible, score.all_passed))
            if score.paid:
                result = replace(
                    result,
                    shown=(*result.shown, score.passed_all(paid=False)),
                    paid=(*result.paid, score.passed_all(paid=True)),
                )
            if truth is not None:
                result = replace(
                    result,
                    hidden=(*result.hidden, truth.all_passed),
                    hidden_share=(*result.hidden_share, truth.pass_share),
                )
            results[request.task.task_id] = result
        return list(results.values()), dropped


class PolicySampler(TaskSampler):
    """Asks a policy for fresh answers: an attempt is one text in one hole.

    Args:
        policy: generates; never trained on what it says here.
        grader: runs the tests; hidden tests run in sandboxes of their own.
        prompt_style, context_lines: as in training.
        max_new_tokens, temperature: as in training.
    """

    def __init__(
        self,
        policy: Policy,
        grader: Grader,
        *,
        prompt_style: str = "completion",
        context_lines: int = 12,
        max_new_tokens: int = 26,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(grader)
        self.policy = policy
        self.prompt_style = prompt_style
        self.context_lines = context_lines
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature

    def follow(self, trainer: Any) -> None:
        """The model that the trainer has may be wrapped in adapters; a policy in this process samples it."""
        self.policy.model = trainer.model  # type: ignore[attr-defined]

    def golden(self, task: Task) -> GradeRequest:
        """The deleted body."""
        return GradeRequest(task, self.grader.store.golden_body(task))

    def attempts(
        self, tasks: Sequence[Task], *, num_samples: int, seed: int, name: str
    ) -> list[list[GradeRequest | None]]:
        """The bodies cut out of what the policy says."""
        del name
        store = self.grader.store
        prompts = [
            build_prompt(
                store.broken_text(t), t.hole, style=self.prompt_style, context_lines=self.context_lines
            )
            for t in tasks
        ]
        self._note("sampling", 0, len(prompts))
        for task, prompt in zip(tasks, prompts, strict=True):
            refuse_leaking_prompt(prompt, store.golden_body(task), task_id=task.task_id)
        answers = self.policy.generate(
            prompts,
            num_samples=num_samples,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=seed,
            is_finished=is_finished if self.prompt_style == "completion" else None,
        )
        return [
            [
                GradeRequest(t, extract_answer(a.text, store.broken_text(t), t.hole, style=self.prompt_style))
                for a in of_task
            ]
            for t, of_task in zip(tasks, answers, strict=True)
        ]
