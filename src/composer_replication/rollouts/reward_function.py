"""The reward function that TRL calls, over the tasks of a store; it keeps every rollout."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import Score, StopReason, Task, TaskOutcome
from composer_replication.rollouts.grading import FORGED, Grader, GradeRequest
from composer_replication.rollouts.rewards import RewardRule, pay, shuffled_rewards
from composer_replication.rollouts.single_turn import extract_answer, is_finished
from composer_replication.run_folder import rewrite_jsonl
from composer_replication.tasks.patches import readable_patch
from composer_replication.tasks.planning.body_cuts import fill

_Graded = tuple[GradeRequest, str, Sequence[int], Score | None, float | None]


class FeatureDeletionReward:
    """``reward(prompts, completions, *, task_id, ...) -> list[float | None]``, one value a completion.

    Each completion is cut to its body, spliced into its task's tree and graded by the
    visible tests; ``rule`` turns text, answer and score into the reward.

    A rollout whose sandbox failed must not move the weights: it has no reward (None), and
    TRL leaves it out of its group's mean with the advantage 0. It is counted. One whose test
    results are forged is paid 0 at most, whatever the rule says of its text.

    Args:
        tasks: by id; every ``task_id`` that TRL passes must be one of them.
        grader: runs the tests.
        rule: in-loop reward.
        prompt_style: as in the recipe.
        tests: ``visible``, or ``weakened`` to pay for tests without assertions.
        folder: where ``step-000001.jsonl`` files go; None keeps nothing.
        part: of the files' names before ``.jsonl``, where several processes share the folder.
        on_outcomes: told of every attempt once it is graded, before the reward is returned.
        end_token_ids: of the policy: an answer that ends with one is finished, and one that does not was cut off.
        shuffle_seed: draws who gets which reward of the batch, for a control run; ``folder`` and
            ``on_outcomes`` still hear what each answer earned. None: everybody gets their own.

    Raises (when called):
        UsageError: lengths differ, or an unknown task (CR0412); the rule raised, or gave
            something that is not a finite number (CR0210).
        SandboxFailure: the sandbox failed for every rollout of the batch (CR0390).
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        grader: Grader,
        rule: RewardRule,
        *,
        prompt_style: str = "completion",
        tests: Literal["visible", "weakened"] = "visible",
        folder: Path | None = None,
        part: str = "",
        on_outcomes: Callable[[Sequence[TaskOutcome]], None] | None = None,
        end_token_ids: Collection[int] = (),
        shuffle_seed: int | None = None,
    ) -> None:
        self.__name__ = "feature_deletion"
        self.tasks, self.grader, self.rule = tasks, grader, rule
        self.prompt_style = prompt_style
        self.tests: Literal["visible", "weakened"] = tests
        self.folder, self.part = folder, part
        self.on_outcomes = on_outcomes
        self.end_token_ids = frozenset(end_token_ids)
        self.shuffle_seed = shuffle_seed
        self._broken_text = cache(grader.store.broken_text)  # a store's tree is read as a whole
        self._step_rows: tuple[int, list[dict[str, Any]]] = (0, [])

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        task_id: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Any = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_columns: Any,  # other columns of the data set do not matter to the reward
    ) -> list[float | None]:
        started = time.monotonic()
        ids = completion_ids if completion_ids is not None else [()] * len(completions)
        if not len(prompts) == len(completions) == len(task_id) == len(ids):
            lengths = f"{len(prompts)}, {len(completions)}, {len(task_id)}, {len(ids)}"
            problem = f"prompts, completions, task ids and token ids differ in number: {lengths}."
            raise UsageError("CR0412", problem)
        texts = [each if isinstance(each, str) else str(each[-1]["content"]) for each in completions]
        requests = [self._request(*row) for row in zip(task_id, texts, strict=True)]
        scores = self.grader.grade_many(requests)
        rewards = [self._paid(*row) for row in zip(requests, texts, scores, strict=True)]
        step = 1 + int(getattr(trainer_state, "global_step", 0))
        if self.folder is not None:
            seconds = time.monotonic() - started
            graded = zip(requests, texts, ids, scores, rewards, strict=True)
            self._keep(self.folder, step, [self._row(row, step=step, seconds=seconds) for row in graded])
        if self.on_outcomes is not None:
            self.on_outcomes([outcome_of(*row) for row in zip(task_id, scores, strict=True)])
        if log_metric is not None:
            for name, value in _metrics(scores).items():
                log_metric(name, value)
        if all(reward is None for reward in rewards):
            problem = "the sandbox failed for every rollout of a batch."
            raise SandboxFailure("CR0390", problem, fix="composer-rl sandbox selftest")
        if self.shuffle_seed is None:
            return rewards
        return shuffled_rewards(rewards, task_id, seed=self.shuffle_seed, step=step)

    def _request(self, task_id: str, text: str) -> GradeRequest:
        task = self.tasks.get(task_id)
        if task is None:
            problem = f"the data set names task {task_id!r}, which is not in the store."
            raise UsageError("CR0412", problem, where=task_id)
        broken = self._broken_text(task)
        answer = extract_answer(text, broken, task.hole, style=self.prompt_style)
        return GradeRequest(task, answer, self.tests)

    def _stop_reason(self, text: str, ids: Sequence[int]) -> StopReason:
        if self.prompt_style == "completion" and is_finished(text):
            return StopReason.STOP_RULE
        is_ended = len(ids) > 0 and int(ids[-1]) in self.end_token_ids
        return StopReason.FINISHED if is_ended else StopReason.LENGTH

    def _paid(self, request: GradeRequest, text: str, score: Score | None) -> float | None:
        """None where the sandbox failed; at most 0 where outcomes were forged, whatever the rule likes about the text."""
        if score is None:
            return None
        paid = pay(self.rule, text, request.answer, score)
        return min(0.0, paid) if score.error.startswith(FORGED) else paid

    def _row(self, graded: _Graded, *, step: int, seconds: float) -> dict[str, Any]:
        """A rollout as a report reads it; ``seconds`` are those of the batch."""
        request, text, ids, score, reward = graded
        task, broken = request.task, self._broken_text(request.task)
        filled = fill(broken, task.hole, request.answer).encode("utf-8", "replace")
        outcomes = {} if score is None else score.outcomes
        stop_reason = StopReason.INFRASTRUCTURE if score is None else self._stop_reason(text, ids)
        return {
            "task_id": task.task_id,
            "step": step,
            "completion_ids": [int(token) for token in ids],
            "text": text,
            "patch": readable_patch({task.hole.path: broken.encode()}, {task.hole.path: filled}),
            "reward": reward,
            "outcomes": {node: str(outcome) for node, outcome in outcomes.items()},
            "error": "" if score is None else score.error,
            "stop_reason": str(stop_reason),
            "seconds": round(seconds if score is None else score.seconds, 4),
        }

    def _keep(self, folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
        if self._step_rows[0] == step:  # dynamic sampling asks again in one step
            rows = [*self._step_rows[1], *rows]
        self._step_rows = (step, rows)
        rewrite_jsonl(folder / f"step-{step:06d}{self.part}.jsonl", rows)


def outcome_of(task_id: str, score: Score | None) -> TaskOutcome:
    """What a grading says of its task; None is a grading that the sandbox lost. A forged one passed nothing."""
    if score is None:
        return TaskOutcome(task_id, is_full_pass=False, trouble="infrastructure")
    return TaskOutcome(task_id, score.all_passed)


def _metrics(scores: Sequence[Score | None]) -> dict[str, float]:
    graded = [score for score in scores if score is not None]
    metrics = {
        "rollouts/infrastructure_failures": float(len(scores) - len(graded)),
        "rollouts/forgeries": float(sum(score.error.startswith(FORGED) for score in graded)),
    }
    if graded:
        metrics["rollouts/visible_pass"] = fmean(score.all_passed for score in graded)
        metrics["rollouts/shown_pass"] = fmean(score.passed_all(paid=False) for score in graded)
    return metrics
