"""The reward function that TRL calls, over the tasks of a store; it keeps every rollout."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import Completion, Rollout, Score, StopReason, Task, TaskOutcome, Turn
from composer_replication.rollouts.file_answers import answered_tree
from composer_replication.rollouts.grading import FORGED, Grader, GradeRequest
from composer_replication.rollouts.rewards import RewardRule, pay, shuffled_rewards
from composer_replication.rollouts.single_turn import extract_answer, is_finished
from composer_replication.run_folder import rewrite_jsonl


@dataclass(frozen=True, slots=True)
class _Attempt:
    task: Task
    text: str
    ids: tuple[int, ...]
    answer: str
    tree: Mapping[str, bytes] | None = None


class FeatureDeletionReward:
    """``reward(prompts, completions, *, task_id, ...) -> list[float]``, one value a completion.

    Each completion is cut to its body, spliced into its task's tree and graded by the
    visible tests; ``rule`` turns text, answer and score into the reward.

    A rollout whose sandbox failed must not move the weights: it gets the mean of its
    group, so its advantage is exactly zero and, without reward scaling, the others'
    advantages are those of the group without it; with ``scale_rewards`` by the standard
    deviation they come out a little larger. It is counted, and stored with reward null.

    Args:
        tasks: by id; every ``task_id`` that TRL passes must be one of them.
        grader: runs the tests.
        rule: in-loop reward.
        prompt_style: as in the recipe, or ``files`` for tasks of any size; see ``file_answers``.
        tests: ``visible``, or ``weakened`` to pay for tests without assertions.
        folder: where ``step-000001.jsonl`` files go; None keeps nothing.
        part: of the files' names before ``.jsonl``, where several processes share the folder.
        on_outcomes: told of every attempt once it is graded, before the reward is returned.
        shuffle_seed: draws who gets which reward of the batch, for a control run; ``folder`` and
            ``on_outcomes`` still hear what each answer earned. None: everybody gets their own.

    Raises (when called):
        UsageError: lengths differ, or an unknown task (CR0212); the rule raised, or gave
            something that is not a finite number (CR0214).
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
        shuffle_seed: int | None = None,
    ) -> None:
        self.__name__ = "feature_deletion"
        self.tasks = tasks
        self.grader = grader
        self.rule = rule
        self.prompt_style = prompt_style
        self.tests: Literal["visible", "weakened"] = tests
        self.folder = folder
        self.part = part
        self.on_outcomes = on_outcomes
        self.shuffle_seed = shuffle_seed
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
        **columns: Any,
    ) -> list[float]:
        del columns  # other data-set columns do not matter to the reward
        started = time.monotonic()
        ids = completion_ids if completion_ids is not None else [()] * len(completions)
        if not len(prompts) == len(completions) == len(task_id) == len(ids):
            lengths = f"{len(prompts)}, {len(completions)}, {len(task_id)}, {len(ids)}"
            raise UsageError(
                "CR0212", f"prompts, completions, task ids and token ids differ in number: {lengths}."
            )
        attempts = [self._attempt(*row) for row in zip(task_id, completions, ids, strict=True)]
        scores = self.grader.grade_many(
            [GradeRequest(a.task, a.answer, self.tests, tree=a.tree) for a in attempts]
        )
        raw = [
            None if score is None else pay(self.rule, attempt.text, attempt.answer, score)
            for attempt, score in zip(attempts, scores, strict=True)
        ]
        step = 1 + int(getattr(trainer_state, "global_step", 0))
        self._keep(step, attempts, scores, raw, time.monotonic() - started)
        if self.on_outcomes is not None:
            self.on_outcomes([outcome_of(*row) for row in zip(task_id, scores, strict=True)])
        if log_metric is not None:
            _log_metrics(log_metric, scores)
        rewards = _impute(raw, task_id)
        if self.shuffle_seed is None:
            return rewards
        return shuffled_rewards(rewards, task_id, seed=self.shuffle_seed, step=step)

    def _attempt(self, task_id: str, completion: Any, ids: Sequence[int]) -> _Attempt:
        task = self.tasks.get(task_id)
        if task is None:
            raise UsageError(
                "CR0212", f"the data set names task {task_id!r}, which is not in the store.", where=task_id
            )
        text = completion if isinstance(completion, str) else str(completion[-1]["content"])
        ids = tuple(int(token) for token in ids)
        if self.prompt_style == "files":
            tree = answered_tree(self.grader.store.files(task, "rollout"), text)
            return _Attempt(task, text, ids, text, tree)
        broken = self.grader.store.broken_text(task)
        answer = extract_answer(text, broken, task.hole, style=self.prompt_style)
        return _Attempt(task, text, ids, answer)

    def _keep(
        self,
        step: int,
        attempts: Sequence[_Attempt],
        scores: Sequence[Score | None],
        rewards: Sequence[float | None],
        seconds: float,
    ) -> None:
        if self.folder is None:
            return
        rollouts = [
            Rollout(
                task_id=a.task.task_id,
                step=step,
                turns=(Turn((), Completion(a.ids, a.text, _stop_reason(a.text))),),
                reward=reward,
                score=score,
                stop_reason=StopReason.INFRASTRUCTURE if score is None else _stop_reason(a.text),
                seconds=score.seconds if score is not None else seconds,
            )
            for a, score, reward in zip(attempts, scores, rewards, strict=True)
        ]
        earlier = (
            self._step_rows[1] if self._step_rows[0] == step else []
        )  # dynamic sampling asks again in one step
        self._step_rows = (step, [*earlier, *(rollout_row(r) for r in rollouts)])
        rewrite_jsonl(self.folder / f"step-{step:06d}{self.part}.jsonl", self._step_rows[1])


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """One stored line: ids, text, reward, outcomes of the tests in the reward, seconds."""
    turn = rollout.turns[-1]
    score = rollout.score
    return {
        "task_id": rollout.task_id,
        "step": rollout.step,
        "completion_ids": list(turn.completion.token_ids),
        "text": turn.completion.text,
        "reward": rollout.reward,
        "outcomes": {} if score is None else {node: str(outcome) for node, outcome in score.outcomes.items()},
        "error": "" if score is None else score.error,
        "stop_reason": str(rollout.stop_reason),
        "seconds": round(rollout.seconds, 4),
    }


def outcome_of(task_id: str, score: Score | None) -> TaskOutcome:
    """What a grading says of its task; None is a grading that the sandbox lost. A forged one passed nothing."""
    if score is None:
        return TaskOutcome(task_id, is_full_pass=False, credit=0.0, trouble="infrastructure")
    if score.error.startswith(FORGED):
        return TaskOutcome(task_id, is_full_pass=False, credit=0.0)
    return TaskOutcome(task_id, score.all_passed, score.pass_share)


def _stop_reason(text: str) -> StopReason:
    return StopReason.STOP_RULE if is_finished(text) else StopReason.LENGTH


def _log_metrics(log_metric: Callable[[str, float], None], scores: Sequence[Score | None]) -> None:
    graded = [score for score in scores if score is not None]
    if graded:
        log_metric("rollouts/visible_pass", statistics.fmean(score.all_passed for score in graded))
    log_metric("rollouts/infrastructure_failures", float(len(scores) - len(graded)))
    log_metric("rollouts/forgeries", float(sum(score.error.startswith(FORGED) for score in graded)))


def _impute(rewards: Sequence[float | None], groups: Sequence[str]) -> list[float]:
    """Fill each missing reward with the mean of its group, else of the batch."""
    known = [reward for reward in rewards if reward is not None]
    if not known:
        raise SandboxFailure(
            "CR0390", "the sandbox failed for every rollout of a batch.", fix="composer-rl sandbox selftest"
        )
    means = {}
    for group in set(groups):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group and r is not None]
        means[group] = statistics.fmean(own or known)
    return [means[g] if r is None else r for r, g in zip(rewards, groups, strict=True)]
