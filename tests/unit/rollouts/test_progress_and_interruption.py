"""Long sampling and grading can be watched, and stopped without a false score."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from composer_replication.records import Completion, StopReason, Task
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.heldout_evaluation import PolicySampler
from composer_replication.tasks.store import TaskStore


class OneAnswer:
    """A policy that always says the same."""

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
        answer = Completion((1,), "\n    return 'watched'\n", StopReason.FINISHED)
        return [[answer] * num_samples for _ in prompts]


@pytest.mark.long
def test_sampling_tells_what_it_does(grader: Grader, store: TaskStore) -> None:
    heard: list[tuple[int, int, str]] = []
    sampler = PolicySampler(OneAnswer(), grader)
    tasks = store.tasks()
    with sampler.reporting(lambda *told: heard.append(told), "before"):
        sampler.sample(tasks, num_samples=2, seed=0)
    graded = [told for told in heard if told[2] == "before: grading"]
    num_runs = len(tasks) + sum(task.has_hidden_tests for task in tasks)  # equal answers are run once
    assert heard[0] == (0, len(tasks), "before: sampling")
    assert graded == [(done, num_runs, "before: grading") for done in range(1, num_runs + 1)]
    heard.clear()
    sampler.sample(tasks, num_samples=1, seed=0)
    assert heard == []


def test_an_interrupted_grading_gives_no_score_and_the_grader_goes_on(grader: Grader, clamp: Task) -> None:
    answers = [f"\n    import time; time.sleep({seconds})" for seconds in (0, 15, 16)]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grader.grade_many([GradeRequest(clamp, answer) for answer in answers], on_done=interrupt)
    score = grader.grade(clamp, "\n    return low")
    assert score is not None
    assert not score.all_passed
