"""A grading's deadline is about the grading: who waits for a place is not late, unless the places stand still."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from episode_parts import FakeEnvironment, Lives, ScriptedPolicy, parts

from composer_replication.records import Outcome, Score, StopReason, Task
from composer_replication.rollouts import places as places_module
from composer_replication.rollouts.episodes.agent_loop import episodes_in_order
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.episode_options import EpisodeOptions
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.places import Places, WorkClock, measured_by
from composer_replication.rollouts.regressions import RegressionCheck
from composer_replication.tasks.running.watched_run import WatchedReport
from composer_replication.tasks.store import TaskStore

pytestmark = pytest.mark.timeout(600)

NUM_EPISODES = 8


class GradedLives(Lives):
    """Environments that are graded by a real grader, each a tree of its own."""

    def __init__(self, grader: Grader, task: Task) -> None:
        super().__init__()
        self.grader, self.task = grader, task

    def open(self, **how: Any) -> FakeEnvironment:
        environment = super().open(**how)
        tree = {"number.txt": str(len(self.opened)).encode()}
        environment.grade = lambda: self.grader.grade_tree(self.task, tree)  # type: ignore[method-assign]
        return environment


@contextmanager
def one_place(store: TaskStore, grade_once: Callable[[GradeRequest], Score]) -> Iterator[Grader]:
    grader = Grader(store, num_jobs=1)
    grader.grade_once = grade_once  # type: ignore[method-assign]
    yield grader
    grader.close()


def passed(request: GradeRequest) -> Score:
    return Score(dict.fromkeys(request.node_ids, Outcome.PASSED))


def number_of(request: GradeRequest) -> int:
    assert request.tree is not None
    return int(request.tree["number.txt"])


def play(grader: Grader, task: Task, grading_seconds: float) -> list[Episode]:
    made = parts(ScriptedPolicy(lambda asked: "<submit></submit>"), GradedLives(grader, task))
    options = EpisodeOptions(grading_seconds=grading_seconds, max_tries=1, closing_seconds=0.1)
    counts: Counter[str] = Counter()
    return asyncio.run(episodes_in_order([task.task_id] * NUM_EPISODES, made, options=options, counts=counts))


def test_many_slow_gradings_on_one_place_drop_no_episode(store: TaskStore, clamp: Task) -> None:
    """Together they take longer than one of them may."""

    def slow(request: GradeRequest) -> Score:
        threading.Event().wait(0.4)
        return passed(request)

    with one_place(store, slow) as grader:
        episodes = play(grader, clamp, grading_seconds=2.0)
    assert [each.failure for each in episodes] == [""] * NUM_EPISODES
    assert [each.reward for each in episodes] == [1.0] * NUM_EPISODES


def test_a_grading_that_takes_too_long_is_late_and_no_other_one(store: TaskStore, clamp: Task) -> None:
    begun: list[int] = []

    def first_is_slow(request: GradeRequest) -> Score:
        begun.append(number_of(request))
        threading.Event().wait(3.0 if len(begun) == 1 else 0.01)
        return passed(request)

    with one_place(store, first_is_slow) as grader:
        grader.places = Places(2, "grader")
        episodes = play(grader, clamp, grading_seconds=1.5)
    assert sorted(each.failure for each in episodes) == [""] * (NUM_EPISODES - 1) + ["CR0822"]


def test_where_the_places_stand_still_nobody_waits_for_ever(store: TaskStore, clamp: Task) -> None:
    gate = threading.Event()

    def hangs(request: GradeRequest) -> Score:
        assert gate.wait(60)
        return passed(request)

    with one_place(store, hangs) as grader:
        episodes = play(grader, clamp, grading_seconds=0.5)
        gate.set()
    assert {each.failure for each in episodes} == {"CR0822"}
    assert {each.stop_reason for each in episodes} == {StopReason.INFRASTRUCTURE}


def test_a_clock_counts_what_runs_and_not_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(places_module.time, "monotonic", lambda: now)
    clock = WorkClock(10.0)
    now += 4
    assert (clock.seconds_left, clock.is_waiting) == (6.0, False)
    moved = now
    clock.wait(lambda: moved)
    now += 8
    assert (clock.seconds_left, clock.is_waiting) == (2.0, True)  # nothing has moved for 8 seconds
    moved = now
    now += 1
    assert clock.seconds_left == 9.0
    clock.go_on()
    now += 5
    clock.go_on()  # it runs already
    assert (clock.seconds_left, clock.is_waiting) == (1.0, False)


def test_runs_of_tests_that_must_stay_green_wait_without_their_clock(
    store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both for a place and for whoever looks at the original code first."""
    grader, gate, clocks = Grader(store, num_jobs=1), threading.Event(), [WorkClock(60.0) for _ in range(3)]
    golden = store.files(clamp, "golden")

    def watched(task: Task, files: object, node_ids: tuple[str, ...], **_: object) -> WatchedReport:
        assert gate.wait(60)
        return WatchedReport(
            dict.fromkeys(node_ids, Outcome.PASSED), error="", flags=frozenset(), seconds=0.0
        )

    def check(clock: WorkClock) -> object:
        with measured_by(clock):
            return looks.check(clamp, golden)

    monkeypatch.setattr(grader, "watched", watched)
    looks = RegressionCheck(grader)
    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(check, clock) for clock in clocks]
        while sum(clock.is_waiting for clock in clocks) != 2:  # the third runs
            assert threading.Event().wait(0.01) is False
        gate.set()
        assert all(each.result() for each in found)
    grader.close()
    assert not any(clock.is_waiting for clock in clocks)
