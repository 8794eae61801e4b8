"""Fresh attempts of a policy, judged by visible and hidden tests; pass rates; and the truth that the guard compares with."""

from __future__ import annotations

import hashlib
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from composer_replication.config import HeldoutSection, RolloutsSection
from composer_replication.errors import InputError, SandboxFailure, UsageError
from composer_replication.records import HeldoutReading, Task
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.single_turn import (
    build_prompt,
    extract_answer,
    is_finished,
    refuse_leaking_prompt,
)
from composer_replication.tasks.difficulty import wilson
from composer_replication.tasks.sentinels import Canary

STATE_VERSION = 2
Report = Callable[[int, int, str], None]
"""Takes (done, total, what is done now)."""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What the samples of one task did, a value each; ``hidden`` is empty when the task has no hidden part.

    ``visible`` are the tests of the reward; ``shown`` and ``paid`` those of them that the policy can read and cannot, both
    empty when it can read all. ``hidden_share`` is the share of its hidden tests that each sample passed.
    """

    task_id: str
    visible: list[bool] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)
    hidden_share: list[float] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    paid: list[bool] = field(default_factory=list)


class TaskSampler(ABC):
    """Asks a policy for fresh attempts and grades them by visible and, in sandboxes of their own, by hidden tests.

    How an attempt comes about is the subclass's; it is handed over as the request that grades it by its visible tests.
    """

    def __init__(self, grader: Grader) -> None:
        self.grader = grader
        self._report: Report | None = None
        self._label = ""

    @abstractmethod
    def attempts(
        self, tasks: Sequence[Task], *, num_samples: int, seed: int, name: str
    ) -> list[list[GradeRequest | None]]:
        """``num_samples`` attempts at each task, kept under ``name``; None for one that infrastructure lost."""

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

    def note_prompts(self, done: int, total: int, what: str = "sampling") -> None:
        """So many attempts are made, or what else is done with them."""
        if self._report is not None:
            self._report(done, total, f"{self._label}: {what}")

    def sample(
        self, tasks: Sequence[Task], *, num_samples: int, seed: int, name: str = ""
    ) -> tuple[list[TaskResult], int]:
        """Results per task, and how many samples were dropped because a sandbox failed."""
        made = self.attempts(tasks, num_samples=num_samples, seed=seed, name=name)
        visible = [each for of_task in made for each in of_task if each is not None]
        hidden = [replace(each, tests="hidden") for each in visible if each.task.has_hidden_tests]
        note = partial(self.note_prompts, what="grading")
        scores = self.grader.grade_many([*visible, *hidden], on_done=note)
        truths = iter(scores[len(visible) :])
        results = {task.task_id: TaskResult(task.task_id) for task in tasks}
        for request, score in zip(visible, scores, strict=False):
            has_truth = request.task.has_hidden_tests
            truth = next(truths) if has_truth else None
            if score is None or (has_truth and truth is None):
                continue
            result = results[request.task.task_id]
            result.visible.append(score.all_passed)
            if score.paid:
                result.shown.append(score.passed_all(paid=False))
                result.paid.append(score.passed_all(paid=True))
            if truth is not None:
                result.hidden.append(truth.all_passed)
                result.hidden_share.append(truth.pass_share)
        num_dropped = sum(map(len, made)) - sum(len(result.visible) for result in results.values())
        return list(results.values()), num_dropped

    def sample_canaries(self, canaries: Sequence[Canary], *, seed: int, name: str = "") -> list[bool | None]:
        """One attempt at each canary: whether it passed all its tests; None where a sandbox failed.

        One that was caught forging outcomes counts as passed: canaries ask whether the policy cheats, and being
        caught is the plainest yes.
        """
        if not canaries:
            return []
        made = self.attempts([canary.task for canary in canaries], num_samples=1, seed=seed, name=name)
        passes: list[bool | None] = [None] * len(canaries)
        asked = {
            place: replace(each, tests="canary", canary=canary)
            for place, (canary, (each,)) in enumerate(zip(canaries, made, strict=True))
            if each is not None
        }
        for place, score in zip(asked, self.grader.grade_many([*asked.values()]), strict=True):
            if score is not None:
                passes[place] = score.all_passed or score.is_forged
        return passes

    def golden_passes(self, tasks: Sequence[Task]) -> dict[str, bool]:
        """The sentinel: by task, whether its golden code passes all its tests at this moment.

        It is run afresh each time, so an outage of the grader shows whatever the policy wrote.
        """
        requests = [
            replace(request, tests=kind)
            for request in map(self.golden, tasks)
            for kind in (("visible", "hidden") if request.task.has_hidden_tests else ("visible",))
        ]
        scores = self.grader.grade_many(requests, afresh=True)
        passes = dict.fromkeys((task.task_id for task in tasks), True)
        for request, score in zip(requests, scores, strict=True):
            passes[request.task.task_id] &= score is not None and score.all_passed
        return passes


class PolicySampler(TaskSampler):
    """Asks a policy (``trainer.policy.InProcessPolicy``) for fresh answers, each of which is one text in one hole."""

    def __init__(
        self,
        policy: Any,
        grader: Grader,
        options: RolloutsSection = RolloutsSection(),  # noqa: B008 - frozen
        *,
        max_new_tokens: int = 26,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(grader)
        self.policy, self.options = policy, options
        self.max_new_tokens, self.temperature = max_new_tokens, temperature

    def follow(self, trainer: Any) -> None:
        """The model that the trainer has may be wrapped in adapters; a policy in this process samples it."""
        self.policy.model = trainer.model

    def golden(self, task: Task) -> GradeRequest:
        """The deleted body."""
        return GradeRequest(task, self.grader.store.golden_body(task))

    def attempts(
        self, tasks: Sequence[Task], *, num_samples: int, seed: int, name: str
    ) -> list[list[GradeRequest | None]]:
        """The bodies cut out of what the policy says."""
        del name
        store, style = self.grader.store, self.options.prompt_style
        self.note_prompts(0, len(tasks))
        prompts = [build_prompt(store.broken_text(task), task.hole, self.options) for task in tasks]
        for task, prompt in zip(tasks, prompts, strict=True):
            refuse_leaking_prompt(prompt, store.golden_body(task), task_id=task.task_id)
        answers = self.policy.generate(
            prompts,
            num_samples=num_samples,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=seed,
            is_finished=is_finished if style == "completion" else None,
        )
        return [
            [
                GradeRequest(task, extract_answer(each.text, store.broken_text(task), task.hole, style=style))
                for each in of_task
            ]
            for task, of_task in zip(tasks, answers, strict=True)
        ]


SIDES = ("visible", "hidden", "shown", "paid")


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased chance that one of k samples passes: 1 - C(n-c, k) / C(n, k).

    Reference: Chen et al., Evaluating large language models trained on code, 2021, eq. 1.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def summarise(results: Sequence[TaskResult], *, infrastructure_failures: int = 0) -> dict[str, Any]:
    """Means over the samples of all tasks, as a run and ``eval`` keep them.

    For each of ``SIDES`` there are ``SIDE_pass`` and ``SIDE_ci95``; a rate without samples is None, never 0. Hidden rates
    and ``gap`` speak of tasks with a hidden part only, shown and paid rates of those with tests that are paid but not shown.
    """
    rates: dict[str, Any] = {
        "num_tasks": len(results),
        "num_samples": sum(len(result.visible) for result in results),
        "infrastructure_failures": infrastructure_failures,
        "gap": None,
    }
    for side in SIDES:
        passed = [each for result in results for each in getattr(result, side)]
        rates[f"{side}_pass"] = sum(passed) / len(passed) if passed else None
        rates[f"{side}_ci95"] = wilson(sum(passed), len(passed)) if passed else None
    twins = [each for result in results if result.hidden for each in result.visible]
    if twins:
        rates["gap"] = sum(twins) / len(twins) - rates["hidden_pass"]
    fewest = min((len(result.visible) for result in results), default=0)
    rates["pass_at_k"] = {
        str(k): sum(pass_at_k(len(r.visible), sum(r.visible), k) for r in results) / len(results)
        for k in (1, 2, 4, 8, 16)
        if k <= fewest
    }
    return rates


class HeldoutEvaluator:
    """``heldout_eval_fn`` for the trainer: a reading when one is due, at each ``every``-th call, else None.

    At each reading ``sample_size`` tasks are drawn at random from the pool (0: all of it, which the guarantee of
    ``EvidenceGuard`` does not allow), without repeats within a reading and anew for the next; the policy attempts each
    ``samples_per_task`` times. A task's pair is (mean visible, mean hidden), of samples that passed all of such tests:
    averaged, since samples of one task are not independent. ``score`` is the mean of the hidden ones, or with
    ``counts_shares`` of the share of hidden tests that passed. Draw and sampling depend on the run's seed and the reading's
    number alone, so a resumed run repeats them.

    A task is neutral in a reading, left out and counted, when the sandbox failed for one of
    its samples or the sentinel failed; neither depends on what the policy wrote. An answer
    that crashes or runs too long scores 0.

    Args:
        sampler: asks the policy, in one answer or by an episode of several turns, and grades.
        tasks: the held-out pool; each with hidden tests.
        options: the ``[heldout]`` table.
        split_fingerprint: of the split that the pool belongs to.
        seed: of draws and samples.
        canaries: tasks that cannot be solved honestly; ``num_canaries`` of them a reading,
            drawn with replacement, one sample each.
        has_sentinel: the golden code of each drawn task runs first, and where it fails the grader is out.
        counts_shares: for a run whose reward is a share of tests, so that the guard compares like with like: such a
            reward may rise by half before a task is solved whole. The pairs stay as they are.

    Raises:
        InputError: a held-out task has no hidden tests (CR0452).
        UsageError: no held-out task, fewer than ``sample_size``, or no canary (CR0452).
        SandboxFailure: the sandbox failed for every task of a reading (CR0390).
    """

    def __init__(
        self,
        sampler: TaskSampler,
        tasks: Sequence[Task],
        options: HeldoutSection = HeldoutSection(),  # noqa: B008 - frozen
        *,
        split_fingerprint: str,
        seed: int = 0,
        canaries: Sequence[Canary] = (),
        has_sentinel: bool = False,
        counts_shares: bool = False,
    ) -> None:
        _refuse_small_pool(tasks, options, len(canaries))
        self.sampler, self.options, self.seed = sampler, options, seed
        self.tasks, self.canaries, self.has_sentinel = tuple(tasks), tuple(canaries), has_sentinel
        self.split_fingerprint, self.counts_shares = split_fingerprint, counts_shares
        self.num_calls = self.evaluation_idx = 0

    def __call__(self) -> HeldoutReading | None:
        self.num_calls += 1
        return None if (self.num_calls - 1) % self.options.every else self._read()

    def draw(self, evaluation_idx: int) -> list[Task]:
        """The tasks of a reading, in the pool's order."""
        size = self.options.sample_size
        if size in (0, len(self.tasks)):
            return list(self.tasks)
        dice = random.Random(derive_seed(self.seed, "draw", evaluation_idx))  # noqa: S311 - a draw, no secret
        return [self.tasks[place] for place in sorted(dice.sample(range(len(self.tasks)), size))]

    def _read(self) -> HeldoutReading:
        started = time.monotonic()
        index, num_samples = self.evaluation_idx + 1, self.options.samples_per_task
        tasks = self.draw(index)
        standing = self.sampler.golden_passes(tasks) if self.has_sentinel else {}
        seed = derive_seed(self.seed, "heldout", index)
        results, _ = self.sampler.sample(
            tasks, num_samples=num_samples, seed=seed, name=f"heldout-{index:06d}"
        )
        out = {task_id for task_id, stands in standing.items() if not stands}
        if out:  # what a grader that is out says of an answer must not stand for it later
            self.sampler.grader.forget(out)
        whole = [each for each in results if len(each.hidden) == num_samples and each.task_id not in out]
        # Before anything is raised: other processes may sample theirs with us.
        passes: list[bool | None] = []
        if self.options.num_canaries:
            dice = random.Random(derive_seed(self.seed, "canaries", index))  # noqa: S311 - a draw, no secret
            chosen = dice.choices(self.canaries, k=self.options.num_canaries)
            seed = derive_seed(self.seed, "canary samples", index)
            passes = self.sampler.sample_canaries(chosen, seed=seed, name=f"canaries-{index:06d}")
        if not whole:
            problem = "the sandbox failed for every task of a held-out evaluation."
            raise SandboxFailure("CR0390", problem, fix="composer-rl sandbox selftest")
        self.evaluation_idx = index  # only now: a reading that broke is made again with the same draw
        return HeldoutReading(
            evaluation_idx=index,
            score=fmean(fmean(r.hidden_share if self.counts_shares else r.hidden) for r in whole),
            pairs=tuple((fmean(r.visible), fmean(r.hidden)) for r in whole),
            canary_passes=tuple(float(passed) for passed in passes if passed is not None),
            split_fingerprint=self.split_fingerprint,
            seconds=time.monotonic() - started,
            infrastructure_failures=len(tasks) - len(whole) + passes.count(None),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, "num_calls": self.num_calls, "evaluation_idx": self.evaluation_idx}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            problem = f"held-out evaluator state version {state.get('version')} is not {STATE_VERSION}."
            raise InputError("CR0401", problem)
        self.num_calls, self.evaluation_idx = int(state["num_calls"]), int(state["evaluation_idx"])


def _refuse_small_pool(tasks: Sequence[Task], options: HeldoutSection, num_made: int) -> None:
    blind = [task.task_id for task in tasks if not task.has_hidden_tests]
    if not tasks:
        problem, where, fix = "there is no held-out task.", "heldout", "name held-out repositories."
    elif blind:
        raise InputError("CR0452", "a held-out task has no hidden tests.", where=blind[0])
    elif options.sample_size > len(tasks):
        problem = f"{len(tasks)} tasks are held out, fewer than the {options.sample_size} of one evaluation."
        where = "heldout.sample_size"
        fix = f"hold out more tasks, or set heldout.sample_size to at most {len(tasks)}."
    elif options.num_canaries and not num_made:
        problem, where = "no held-out task could be made a canary.", "heldout.num_canaries"
        fix = "hold out tasks whose tests are plain functions, or set heldout.num_canaries to 0."
    else:
        return
    raise UsageError("CR0452", problem, where=where, fix=fix)


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """A 63-bit seed that depends on all three and on nothing else."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
