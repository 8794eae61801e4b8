"""Held-out evaluation with real grading and a policy that answers what it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
from scripted_policy import FORGER

from composer_replication.config import HeldoutSection
from composer_replication.errors import InputError, SandboxFailure, UsageError
from composer_replication.records import Completion, StopReason, Task
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.heldout_evaluation import HeldoutEvaluator, PolicySampler
from composer_replication.tasks.sentinels import make_canary
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
        HeldoutSection(every=every, samples_per_task=len(answers)),
        split_fingerprint="f" * 64,
        seed=3,
    )


def test_a_reading_holds_means_pairs_and_fingerprint(grader: Grader, store: TaskStore, clamp: Task) -> None:
    reading = make_evaluator(grader, clamp, [store.golden_body(clamp), "\n    return None"])()
    assert reading is not None
    assert reading.score == 0.5
    assert reading.pairs == ((0.5, 0.5),)
    assert reading.evaluation_idx == 1
    assert reading.split_fingerprint == "f" * 64
    assert reading.infrastructure_failures == 0


def test_beside_a_reward_of_shares_the_score_is_the_share_of_hidden_tests(
    grader: Grader, clamp: Task
) -> None:
    half = "\n    return max(x, low)"
    hidden = grader.grade(clamp, half, "hidden")
    assert hidden is not None and 0.0 < hidden.pass_share < 1.0
    evaluator = make_evaluator(grader, clamp, [half])
    evaluator.counts_shares = True
    reading = evaluator()
    assert reading is not None
    assert (reading.score, reading.pairs[0][1]) == (hidden.pass_share, 0.0)


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


# ---- draws


def pool(clamp: Task, size: int) -> list[Task]:
    return [replace(clamp, task_id=f"task-{index:02d}") for index in range(size)]


def drawing(grader: Grader, clamp: Task, *, size: int, seed: int = 3) -> HeldoutEvaluator:
    sampler = PolicySampler(ScriptedPolicy(["x"]), grader)
    return HeldoutEvaluator(
        sampler, pool(clamp, 12), HeldoutSection(sample_size=size), split_fingerprint="", seed=seed
    )


def test_a_draw_has_no_repeats_and_every_task_gets_its_turn(grader: Grader, clamp: Task) -> None:
    """512 draws of 3 of 12: each task 128 times on average, sd 9.8; five sd are allowed."""
    evaluator = drawing(grader, clamp, size=3)
    draws = [[task.task_id for task in evaluator.draw(index)] for index in range(1, 513)]
    assert all(len(set(draw)) == 3 for draw in draws)
    counts = Counter(task_id for draw in draws for task_id in draw)
    assert len(counts) == 12
    assert all(79 <= count <= 177 for count in counts.values())


def test_draws_depend_on_seed_and_number_alone(grader: Grader, clamp: Task) -> None:
    one, same, other = (drawing(grader, clamp, size=4, seed=seed) for seed in (3, 3, 4))
    assert [one.draw(n) for n in (5, 1)] == [same.draw(n) for n in (5, 1)]
    assert [one.draw(n) for n in range(9)] != [other.draw(n) for n in range(9)]


def test_a_pool_smaller_than_the_sample_is_refused(grader: Grader, clamp: Task) -> None:
    with pytest.raises(UsageError, match="12 tasks are held out, fewer than the 13"):
        drawing(grader, clamp, size=13)


# ---- what makes a task neutral


class BrokenHalf(Grader):
    """A grader whose sandbox fails on some requests; a stand-in for an outage that no test can order."""

    def __init__(self, grader: Grader, fails: Callable[[GradeRequest], bool]) -> None:
        self.grader, self.fails, self.store = grader, fails, grader.store
        self.run_again: set[str] = set()

    def grade_many(self, requests, *, on_done=None, afresh=False):  # type: ignore[no-untyped-def]
        scores = self.grader.grade_many(requests, on_done=on_done, afresh=afresh)
        self.run_again |= {request.answer for request in requests if afresh}
        return [
            None if self.fails(request) else score for request, score in zip(requests, scores, strict=True)
        ]

    def forget(self, task_ids: Collection[str]) -> None:
        self.grader.forget(task_ids)


def test_a_task_is_neutral_as_a_whole_when_one_of_its_samples_has_no_score(
    grader: Grader, store: TaskStore, clamp: Task
) -> None:
    """Averaging what is left would depend on which answer met the outage."""
    golden, stub = store.golden_body(clamp), "\n    return None"
    broken = BrokenHalf(grader, lambda request: request.answer == stub)
    sampler = PolicySampler(ScriptedPolicy([golden, stub]), broken)
    evaluator = HeldoutEvaluator(sampler, [clamp], HeldoutSection(samples_per_task=2), split_fingerprint="")
    with pytest.raises(SandboxFailure, match="every task"):
        evaluator()
    assert evaluator.evaluation_idx == 0  # the same draw is made again
    broken.fails = lambda request: False
    reading = evaluator()
    assert reading is not None
    assert (reading.evaluation_idx, reading.pairs) == (1, ((0.5, 0.5),))


def test_the_sentinel_neutralises_whatever_the_policy_wrote(
    grader: Grader, store: TaskStore, clamp: Task
) -> None:
    golden = store.golden_body(clamp)
    is_out = [False]
    broken = BrokenHalf(grader, lambda request: is_out[0] and request.answer == golden)
    sampler = PolicySampler(ScriptedPolicy(["\n    return None"]), broken)
    evaluator = HeldoutEvaluator(sampler, [clamp], split_fingerprint="", has_sentinel=True)
    reading = evaluator()
    assert reading is not None
    assert reading.pairs == ((0.0, 0.0),)  # a wrong answer under a grader that works counts
    is_out[0] = True
    with pytest.raises(SandboxFailure):
        evaluator()
    assert broken.run_again == {golden}  # else an outage would be answered from memory
    assert clamp.task_id not in {key[0] for key in grader._seen}  # nor is what was said meanwhile remembered


# ---- canaries


@pytest.mark.long
def test_canaries_are_passed_by_forged_outcomes_alone(grader: Grader, store: TaskStore, clamp: Task) -> None:
    canary = make_canary(store, clamp)
    assert canary is not None
    passes = {}
    for answer in (store.golden_body(clamp), "\n    return 0", FORGER):
        evaluator = HeldoutEvaluator(
            PolicySampler(ScriptedPolicy([answer]), grader),
            [clamp],
            HeldoutSection(num_canaries=3),
            split_fingerprint="",
            canaries=[canary],
        )
        reading = evaluator()
        assert reading is not None
        passes[answer] = reading.canary_passes
    assert list(passes.values()) == [(0.0,) * 3, (0.0,) * 3, (1.0,) * 3]


def test_canaries_that_nobody_could_make_are_refused(grader: Grader, clamp: Task) -> None:
    sampler = PolicySampler(ScriptedPolicy(["x"]), grader)
    with pytest.raises(UsageError, match="could be made a canary"):
        HeldoutEvaluator(sampler, [clamp], HeldoutSection(num_canaries=1), split_fingerprint="")
