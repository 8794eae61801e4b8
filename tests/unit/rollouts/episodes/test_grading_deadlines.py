"""A grading's deadline is about the grading: who waits for a place is not late, unless the places stand still."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from episode_parts import FakeEnvironment, Lives, ScriptedPolicy, parts

from composer_replication.records import Outcome, Score, StopReason
from composer_replication.rollouts import places as places_module
from composer_replication.rollouts.episodes.agent_loop import episodes_in_order
from composer_replication.rollouts.episodes.episode import Episode
from composer_replication.rollouts.episodes.episode_options import EpisodeOptions
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.rollouts.places import Places, WorkClock, measured_by

pytestmark = pytest.mark.timeout(600)

NUM_EPISODES = 8
TASK: Any = SimpleNamespace(task_id="task", tests=SimpleNamespace(visible=("tests/test_a.py::test_a",)))
NO_STORE: Any = SimpleNamespace(root=Path("/nowhere"))


class BareGrader(Grader):
    """What it runs is given, so that it needs no store and no sandbox; its places are real."""

    def require_guards(self) -> tuple[str, ...]:
        return ()


class GradedLives(Lives):
    """Environments that are graded by one grader, each a tree of its own."""

    def __init__(self, grader: Grader) -> None:
        super().__init__()
        self.grader = grader

    def open(self, **how: Any) -> FakeEnvironment:
        environment = super().open(**how)
        tree = {"number.txt": str(len(self.opened)).encode()}
        environment.grade = lambda: self.grader.grade_tree(TASK, tree)  # type: ignore[method-assign]
        return environment


@contextmanager
def grading_by(grade_once: Callable[[GradeRequest], Score], num_jobs: int = 1) -> Iterator[Grader]:
    grader = BareGrader(NO_STORE, num_jobs=num_jobs)
    grader.grade_once = grade_once  # type: ignore[method-assign]
    yield grader
    grader.close()


def passed(request: GradeRequest) -> Score:
    return Score(dict.fromkeys(request.node_ids, Outcome.PASSED))


def play(grader: Grader, grading_seconds: float) -> list[Episode]:
    made = parts(ScriptedPolicy(lambda asked: "<submit></submit>"), GradedLives(grader))
    options = EpisodeOptions(grading_seconds=grading_seconds, max_tries=1, closing_seconds=0.1)
    return asyncio.run(episodes_in_order(["task"] * NUM_EPISODES, made, options=options))


@pytest.mark.long
def test_many_slow_gradings_on_one_place_drop_no_episode() -> None:
    """Together they take longer than one of them may."""

    def slow(request: GradeRequest) -> Score:
        threading.Event().wait(0.4)
        return passed(request)

    with grading_by(slow) as grader:
        episodes = play(grader, grading_seconds=2.0)
    assert [each.failure for each in episodes] == [""] * NUM_EPISODES
    assert [each.reward for each in episodes] == [1.0] * NUM_EPISODES


def test_a_grading_that_takes_too_long_is_late_and_no_other_one() -> None:
    begun: list[GradeRequest] = []
    gate = threading.Event()

    def first_is_slow(request: GradeRequest) -> Score:
        begun.append(request)
        if len(begun) == 1:
            assert gate.wait(60)
        return passed(request)

    with grading_by(first_is_slow, num_jobs=2) as grader:
        episodes = play(grader, grading_seconds=1.5)
        gate.set()
    assert sorted(each.failure for each in episodes) == [""] * (NUM_EPISODES - 1) + ["CR0822"]


def test_where_the_places_stand_still_nobody_waits_for_ever() -> None:
    gate = threading.Event()

    def hangs(request: GradeRequest) -> Score:
        assert gate.wait(60)
        return passed(request)

    with grading_by(hangs) as grader:
        episodes = play(grader, grading_seconds=0.5)
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


def test_who_waits_for_a_place_or_for_whoever_looks_first_waits_without_its_clock() -> None:
    places, gate, lock = Places(1, "place"), threading.Event(), threading.Lock()
    clocks = [WorkClock(60.0) for _ in range(3)]

    def look(clock: WorkClock) -> bool:
        with measured_by(clock), places.turn_of(lock):
            return places.run(lambda: gate.wait(60))

    def run(clock: WorkClock) -> bool:
        with measured_by(clock):
            return places.run(lambda: gate.wait(60))

    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(work, clock) for work, clock in zip((look, look, run), clocks, strict=True)]
        while sum(clock.is_waiting for clock in clocks) != 2:  # the third has the place
            threading.Event().wait(0.01)
        gate.set()
        assert all(each.result() for each in found)
    places.close()
    assert not any(clock.is_waiting for clock in clocks)
