"""Fresh samples on tasks that are never trained on: the truth that the guard compares with."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from composer_replication.errors import InputError, SandboxFailure, UsageError
from composer_replication.interfaces import Policy
from composer_replication.records import HeldoutReading, Task
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.pass_rates import TaskResult
from composer_replication.rollouts.single_turn import (
    build_prompt,
    extract_answer,
    is_finished,
    refuse_leaking_prompt,
)

STATE_VERSION = 1

Report = Callable[[int, int, str], None]
"""Takes (done, total, what is done now)."""


class PolicySampler:
    """Asks a policy for fresh answers and grades them by visible and hidden tests.

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
        self.policy = policy
        self.grader = grader
        self.prompt_style = prompt_style
        self.context_lines = context_lines
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self._report: Report | None = None
        self._label = ""

    @contextmanager
    def reporting(self, report: Report | None, label: str) -> Iterator[None]:
        """Inside, ``report`` is told (done, total, what) of the prompts answered and the answers graded."""
        self._report, self._label = report, label
        try:
            yield
        finally:
            self._report = None

    def note_prompts(self, done: int, total: int) -> None:
        """For the policy, if it can tell: so many prompts are answered."""
        self._note("sampling", done, total)

    def _note(self, what: str, done: int, total: int) -> None:
        if self._report is not None:
            self._report(done, total, f"{self._label}: {what}")

    def sample(self, tasks: Sequence[Task], *, num_samples: int, seed: int) -> tuple[list[TaskResult], int]:
        """Results per task, and how many samples were dropped because a sandbox failed."""
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
        bodies = [
            [extract_answer(a.text, store.broken_text(t), t.hole, style=self.prompt_style) for a in of_task]
            for t, of_task in zip(tasks, answers, strict=True)
        ]
        return self._grade(tasks, bodies)

    def _grade(self, tasks: Sequence[Task], bodies: Sequence[Sequence[str]]) -> tuple[list[TaskResult], int]:
        visible = [
            GradeRequest(t, body) for t, of_task in zip(tasks, bodies, strict=True) for body in of_task
        ]
        hidden = [GradeRequest(r.task, r.answer, "hidden") for r in visible if r.task.has_hidden_tests]
        scores = self.grader.grade_many([*visible, *hidden], on_done=partial(self._note, "grading"))
        hidden_scores = iter(scores[len(visible) :])
        by_task: dict[str, tuple[list[bool], list[bool]]] = {t.task_id: ([], []) for t in tasks}
        dropped = 0
        for request, score in zip(visible, scores, strict=False):
            twin = next(hidden_scores) if request.task.has_hidden_tests else score
            if score is None or twin is None:
                dropped += 1
                continue
            by_task[request.task.task_id][0].append(score.all_passed)
            if request.task.has_hidden_tests:
                by_task[request.task.task_id][1].append(twin.all_passed)
        return [TaskResult(task_id, tuple(v), tuple(h)) for task_id, (v, h) in by_task.items()], dropped


class HeldoutEvaluator:
    """``heldout_eval_fn`` for the trainer: a reading every ``every``-th call, else None (not due).

    All held-out tasks are sampled afresh at each reading with a seed derived from
    the run's seed and the reading's index, so a resumed run repeats the same draw.
    ``score`` is the mean over tasks of the share of samples that pass the hidden
    tests; a task's pair is (mean visible, mean hidden).

    Raises:
        InputError: a held-out task has no hidden tests (CR0451).
        UsageError: no held-out task at all (CR0452).
        SandboxFailure: the sandbox failed for every sample of a reading (CR0390).
    """

    def __init__(
        self,
        sampler: PolicySampler,
        tasks: Sequence[Task],
        *,
        split_fingerprint: str,
        seed: int = 0,
        every: int = 1,
        samples_per_task: int = 1,
    ) -> None:
        if not tasks:
            raise UsageError(
                "CR0452", "there is no held-out task.", where="heldout", fix="name held-out repositories."
            )
        blind = [task.task_id for task in tasks if not task.has_hidden_tests]
        if blind:
            raise InputError("CR0451", "a held-out task has no hidden tests.", where=blind[0])
        self.sampler = sampler
        self.tasks = tuple(tasks)
        self.split_fingerprint = split_fingerprint
        self.seed = seed
        self.every = every
        self.samples_per_task = samples_per_task
        self.num_calls = 0
        self.evaluation_idx = 0
        self.last_visible: float | None = None

    def __call__(self) -> HeldoutReading | None:
        self.num_calls += 1
        if (self.num_calls - 1) % self.every:
            return None
        started = time.monotonic()
        self.evaluation_idx += 1
        results, dropped = self.sampler.sample(
            self.tasks,
            num_samples=self.samples_per_task,
            seed=derive_seed(self.seed, "heldout", self.evaluation_idx),
        )
        pairs = [(statistics.fmean(r.visible), statistics.fmean(r.hidden)) for r in results if r.hidden]
        if not pairs:
            raise SandboxFailure(
                "CR0390",
                "the sandbox failed for every sample of a held-out evaluation.",
                fix="composer-rl sandbox selftest",
            )
        self.last_visible = statistics.fmean(visible for visible, _ in pairs)
        return HeldoutReading(
            evaluation_idx=self.evaluation_idx,
            score=statistics.fmean(hidden for _, hidden in pairs),
            pairs=tuple(pairs),
            canary_passes=(),
            split_fingerprint=self.split_fingerprint,
            seconds=time.monotonic() - started,
            infrastructure_failures=dropped,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, "num_calls": self.num_calls, "evaluation_idx": self.evaluation_idx}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise InputError(
                "CR0401", f"held-out evaluator state version {state.get('version')} is not {STATE_VERSION}."
            )
        self.num_calls = int(state["num_calls"])
        self.evaluation_idx = int(state["evaluation_idx"])


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """A 63-bit seed that depends on all three and on nothing else."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
