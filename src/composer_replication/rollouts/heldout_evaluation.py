"""The truth that the guard compares with: fresh samples on tasks that are never trained on."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from composer_replication.config import HeldoutSection
from composer_replication.errors import InputError, SandboxFailure, UsageError
from composer_replication.records import HeldoutReading, Task
from composer_replication.rollouts.task_sampler import TaskSampler
from composer_replication.tasks.canaries import Canary

STATE_VERSION = 2


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
        counts_shares: bool = False,
    ) -> None:
        _refuse_small_pool(tasks, options, len(canaries))
        self.sampler, self.options, self.seed = sampler, options, seed
        self.tasks, self.canaries = tuple(tasks), tuple(canaries)
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
        standing = self.sampler.golden_passes(tasks) if self.options.has_sentinel else {}
        seed = derive_seed(self.seed, "heldout", index)
        results, _ = self.sampler.sample(
            tasks, num_samples=num_samples, seed=seed, name=f"heldout-{index:06d}"
        )
        out = {task_id for task_id, stands in standing.items() if not stands}
        if out:  # what a grader that is out says of an answer must not stand for it later
            self.sampler.grader.forget(out)
        whole = [each for each in results if len(each.hidden) == num_samples and each.task_id not in out]
        # Before anything is raised: other processes may sample theirs with us.
        passes = self._canary_passes(index)
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

    def _canary_passes(self, index: int) -> list[bool | None]:
        if not self.options.num_canaries:
            return []
        dice = random.Random(derive_seed(self.seed, "canaries", index))  # noqa: S311 - a draw, no secret
        chosen = dice.choices(self.canaries, k=self.options.num_canaries)
        seed = derive_seed(self.seed, "canary samples", index)
        return self.sampler.sample_canaries(chosen, seed=seed, name=f"canaries-{index:06d}")

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
