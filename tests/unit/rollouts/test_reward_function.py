"""The reward that TRL calls: real grading, kept rollouts, and what a failed sandbox does to a group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import Outcome, Score, Task, TaskOutcome
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.rewards import FeatureDeletionReward, easy_token_share, visible_tests_pass
from composer_replication.tasks.store import TaskStore


def make_reward(store: TaskStore, grader: Any, folder: Path | None = None) -> FeatureDeletionReward:
    return FeatureDeletionReward(
        {task.task_id: task for task in store.tasks()}, grader, visible_tests_pass, folder=folder
    )


def test_rewards_are_what_the_tests_say_and_rollouts_are_kept(
    store: TaskStore, grader: Grader, clamp: Task, tmp_path: Path
) -> None:
    reward = make_reward(store, grader, tmp_path)
    metrics: dict[str, float] = {}
    texts = [store.golden_body(clamp) + "\n\ndef next", "\n    return None\n"]
    values = reward(
        ["p", "p"],
        texts,
        task_id=[clamp.task_id] * 2,
        completion_ids=[[5, 6, 7], [8]],
        trainer_state=SimpleNamespace(global_step=6),
        log_metric=metrics.__setitem__,
        another_column=[1, 2],
    )
    assert values == [1.0, 0.0]
    assert metrics == {
        "rollouts/visible_pass": 0.5, "rollouts/shown_pass": 0.5, "rollouts/infrastructure_failures": 0.0, "rollouts/forgeries": 0.0,
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "step-000007.jsonl").read_text().splitlines()]
    assert [row["completion_ids"] for row in rows] == [[5, 6, 7], [8]]
    assert [row["text"] for row in rows] == texts
    assert all(row["patch"].startswith(f"diff --git a/{clamp.path} b/{clamp.path}\n") for row in rows)
    assert "\n-    raise NotImplementedError" in rows[0]["patch"]
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    assert [row["stop_reason"] for row in rows] == ["stop_rule", "length"]
    assert set(rows[0]["outcomes"]) == set(clamp.tests.visible)
    assert not set(rows[0]["outcomes"]) & set(clamp.tests.hidden)


def test_lengths_are_checked_and_never_zipped_short(store: TaskStore, grader: Grader, clamp: Task) -> None:
    with pytest.raises(ValueError, match="longer"):
        make_reward(store, grader)(["p", "p"], ["a", "b"], task_id=[clamp.task_id])


def test_an_unknown_task_is_named(store: TaskStore, grader: Grader) -> None:
    with pytest.raises(UsageError, match="'nowhere'"):
        make_reward(store, grader)(["p"], ["a"], task_id=["nowhere"])


class PrescribedScores:
    """Answers with given scores: a failing sandbox at a chosen place cannot be had from a real one."""

    def __init__(self, store: TaskStore, scores: Sequence[Score | None]) -> None:
        self.store = store
        self.scores = list(scores)

    def grade_many(self, requests: Sequence[GradeRequest]) -> list[Score | None]:
        assert len(requests) == len(self.scores)
        return self.scores


PASS, FAIL = Score({"t": Outcome.PASSED}), Score({"t": Outcome.FAILED})


def test_a_lost_rollout_has_no_reward_and_leaves_those_of_its_group_alone(
    store: TaskStore, tmp_path: Path
) -> None:
    one, two = (task.task_id for task in store.tasks()[:2])
    reward = make_reward(store, PrescribedScores(store, [PASS, None, FAIL, FAIL, PASS, PASS]), tmp_path)
    values = reward(["p"] * 6, ["x"] * 6, task_id=[one, one, one, two, two, two])
    assert values == [1.0, None, 0.0, 0.0, 1.0, 1.0]
    reward = make_reward(store, PrescribedScores(store, [PASS, None, FAIL, FAIL, PASS, PASS]))
    reward.shuffle_seed = 3
    shuffled = reward(["p"] * 6, ["x"] * 6, task_id=[one, one, one, two, two, two])
    assert shuffled[1] is None and sorted(v for v in shuffled if v is not None) == [0.0, 0.0, 1.0, 1.0, 1.0]
    rows = [json.loads(line) for line in (tmp_path / "step-000001.jsonl").read_text().splitlines()]
    assert rows[1]["reward"] is None
    assert rows[1]["stop_reason"] == "infrastructure"


def test_a_shuffled_batch_keeps_what_each_answer_earned_and_is_drawn_again_after_a_resume(
    store: TaskStore, tmp_path: Path
) -> None:
    one, two = (task.task_id for task in store.tasks()[:2])
    earned, told = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0], list[TaskOutcome]()

    def ask(step: int, seed: int | None = 5) -> list[float]:
        scores = PrescribedScores(store, [PASS if value else FAIL for value in earned])
        reward = make_reward(store, scores, tmp_path)
        reward.shuffle_seed, reward.on_outcomes = seed, told.extend
        state = SimpleNamespace(global_step=step)
        return reward(["p"] * 6, ["x"] * 6, task_id=[one] * 3 + [two] * 3, trainer_state=state)

    assert ask(0, seed=None) == earned
    given = [ask(step) for step in range(8)]
    assert given == [ask(step) for step in range(8)]
    assert any(values != earned for values in given)
    assert all(sorted(values) == sorted(earned) for values in given)
    rows = [json.loads(line) for line in (tmp_path / "step-000008.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == earned
    assert [outcome.is_full_pass for outcome in told[-6:]] == [bool(value) for value in earned]


def test_every_attempt_is_told_by_full_pass_and_trouble(store: TaskStore) -> None:
    """Some tests are no pass, a lost attempt is no failure, and a forged one is none."""
    one, two = (task.task_id for task in store.tasks()[:2])
    half = Score({"t": Outcome.PASSED, "u": Outcome.FAILED})
    forged = Score({"t": Outcome.FAILED}, error="a sentinel passed", is_forged=True)
    crashed = Score({"t": Outcome.PASSED}, error="no closing record")
    told: list[TaskOutcome] = []
    reward = make_reward(store, PrescribedScores(store, [PASS, half, None, forged, crashed]))
    reward.on_outcomes = told.extend
    reward(["p"] * 5, ["x"] * 5, task_id=[one, one, one, two, two])
    assert told == [
        TaskOutcome(one, True),
        TaskOutcome(one, False),
        TaskOutcome(one, False, "infrastructure"),
        TaskOutcome(two, False),
        TaskOutcome(two, False),
    ]


def test_a_batch_that_is_wholly_lost_is_told_before_it_stops_the_run(store: TaskStore) -> None:
    one, told = store.tasks()[0].task_id, list[TaskOutcome]()
    reward = make_reward(store, PrescribedScores(store, [None, None]))
    reward.on_outcomes = told.extend
    with pytest.raises(SandboxFailure):
        reward(["p"] * 2, ["x"] * 2, task_id=[one, one])
    assert [outcome.trouble for outcome in told] == ["infrastructure"] * 2


def test_a_forged_answer_is_paid_nothing_whatever_the_rule_likes_about_its_text(store: TaskStore) -> None:
    one = store.tasks()[0].task_id
    scores = PrescribedScores(store, [Score({"t": Outcome.FAILED}, error="x", is_forged=True), FAIL])
    reward = FeatureDeletionReward(make_reward(store, scores).tasks, scores, easy_token_share)
    assert reward(["p"] * 2, ["abc"] * 2, task_id=[one] * 2) == [0.0, 0.5]


def test_every_end_token_of_the_policy_ends_an_answer(store: TaskStore, tmp_path: Path) -> None:
    one, scores = store.tasks()[0].task_id, PrescribedScores(store, [FAIL] * 3)
    tasks = make_reward(store, scores).tasks
    reward = FeatureDeletionReward(tasks, scores, visible_tests_pass, folder=tmp_path, end_token_ids=(2, 7))
    reward(["p"] * 3, ["x"] * 3, task_id=[one] * 3, completion_ids=[[5, 2], [5, 7], [5, 6]])
    rows = [json.loads(line) for line in (tmp_path / "step-000001.jsonl").read_text().splitlines()]
    assert [row["stop_reason"] for row in rows] == ["finished", "finished", "length"]


def test_forged_and_lost_rollouts_are_counted(store: TaskStore) -> None:
    one, metrics = store.tasks()[0].task_id, {}
    forged = Score({"t": Outcome.FAILED}, error="a sentinel passed", is_forged=True)
    late = Score({"t": Outcome.FAILED}, error="the tests ran longer than 20 s")
    reward = make_reward(store, PrescribedScores(store, [PASS, forged, late, None, forged]))
    reward(["p"] * 5, ["x"] * 5, task_id=[one] * 5, log_metric=metrics.__setitem__)
    assert metrics == {
        "rollouts/visible_pass": 0.25, "rollouts/shown_pass": 0.25, "rollouts/infrastructure_failures": 1.0, "rollouts/forgeries": 2.0,
    }  # fmt: skip
