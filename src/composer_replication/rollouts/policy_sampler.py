"""Ask a policy for fresh answers and let visible and hidden tests judge them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer_replication.interfaces import Policy
from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.single_turn import (
    build_prompt,
    extract_answer,
    is_finished,
    refuse_leaking_prompt,
)
from composer_replication.rollouts.task_sampler import TaskSampler


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
        """The bodies cut out of what the policy says.

        Raises:
            InputError: a prompt shows the deleted code (CR0429).
        """
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
