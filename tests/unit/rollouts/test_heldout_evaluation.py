"""Held-out evaluation with real grading and a policy that answers what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from composer_replication.errors import InputError, UsageError
from composer_replication.records import Completion, StopReason, Task
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.heldout_evaluation import HeldoutEvaluator, PolicySampler, derive_seed
from composer_replication.tasks.store import TaskStore


class ScriptedPolicy:
    """Gives one answer after another to every prompt; remembers the seeds that it was asked with."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.seeds: list[int] = []

    def generate(
        self,
        prompts: Sequence[str],
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        is_finished: Callable[[str], bool] | None = None,
    ) -> list[list[Completion]]:
        assert is_finished is not None
        assert max_new_tokens == 26
        assert temperature == 1.0
        self.seeds.append(seed)
        return [
            [
                Completion((1,), self.answers[n % len(self.answers)], StopReason.LENGTH)
                for n in range(num_samples)
            ]
            for _ in prompts
        ]


def make_evaluator(grader: Grader, task: Task, answers: Sequence[str], every: int = 1) -> HeldoutEvaluator:
    return HeldoutEvaluator(
        PolicySampler(ScriptedPolicy(answers), grader),
        [task],
        split_fingerprint="f" * 64,
        seed=3,
        every=every,
        samples_per_task=len(answers),
    )


def test_a_reading_holds_means_pairs_and_fingerprint(grader: Grader, store: TaskStore, clamp: Task) -> None:
    reading = make_evaluator(grader, clamp, [store.golden_body(clamp), "\n    return None"])()
    assert reading is not None
    assert reading.score == 0.5
    assert reading.pairs == ((0.5, 0.5),)
    assert reading.evaluation_idx == 1
    assert reading.split_fingerprint == "f" * 64
    assert reading.infrastructure_failures == 0


def test_it_is_due_at_every_nth_call_with_a_fresh_seed_each(grader: Grader, clamp: Task) -> None:
    evaluator = make_evaluator(grader, clamp, ["\n    return None"], every=3)
    readings = [evaluator() for _ in range(7)]
    assert [reading is not None for reading in readings] == [True, False, False, True, False, False, True]
    policy = evaluator.sampler.policy
    assert isinstance(policy, ScriptedPolicy)
    assert len(set(policy.seeds)) == 3


def test_a_restored_evaluator_repeats_the_draws_of_an_uninterrupted_one(grader: Grader, clamp: Task) -> None:
    whole = make_evaluator(grader, clamp, ["\n    return None"], every=2)
    first = make_evaluator(grader, clamp, ["\n    return None"], every=2)
    for _ in range(5):
        whole()
    for _ in range(3):
        first()
    second = make_evaluator(grader, clamp, ["\n    return None"], every=2)
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        second()
    policies = [evaluator.sampler.policy for evaluator in (whole, first, second)]
    seeds = [policy.seeds for policy in policies if isinstance(policy, ScriptedPolicy)]
    assert seeds[0] == seeds[1] + seeds[2]
    assert second.state_dict() == whole.state_dict()


def test_state_of_another_version_is_refused(grader: Grader, clamp: Task) -> None:
    with pytest.raises(InputError, match="version 9"):
        make_evaluator(grader, clamp, ["x"]).load_state_dict({"version": 9})


def test_a_task_without_hidden_tests_is_never_held_out(grader: Grader, store: TaskStore, clamp: Task) -> None:
    blind = [task for task in store.tasks() if not task.has_hidden_tests]
    assert blind, "the project must have a task with one test function"
    sampler = PolicySampler(ScriptedPolicy(["x"]), grader)
    with pytest.raises(InputError, match="no hidden tests"):
        HeldoutEvaluator(sampler, [clamp, *blind], split_fingerprint="")


def test_nothing_held_out_is_refused(grader: Grader) -> None:
    with pytest.raises(UsageError, match="CR0452"):
        HeldoutEvaluator(PolicySampler(ScriptedPolicy(["x"]), grader), [], split_fingerprint="")


def test_seeds_depend_on_all_three_parts() -> None:
    seeds = {derive_seed(s, p, i) for s in (0, 1) for p in ("a", "b") for i in (1, 2)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
