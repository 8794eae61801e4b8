"""A saved curriculum goes on exactly where it was, and a foreign or damaged one is refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum import Curriculum, Standing, recorded_standings
from composer_replication.tasks.difficulty import Difficulty, MeasuredPolicy, record_difficulty


def standing(passed: float = 0.0, failed: float = 0.0) -> Standing:
    return Standing(passed=passed, failed=failed, status="active")


TASKS = [f"t{n}" for n in range(7)]
FADES_SOON = type("FadesSoon", (Curriculum,), {"half_life": 3.0})


def make(*, fingerprint: str = "store", task_ids: list[str] = TASKS, seed: int = 5) -> Curriculum:
    return FADES_SOON([{"task_id": task_id} for task_id in task_ids], seed=seed, fingerprint=fingerprint)


def play(curriculum: Curriculum, moves: list[tuple[int, int]]) -> list[list[str]]:
    """Each move: how many rows, and a number that decides what comes of them."""
    drawn = []
    for num, luck in moves:
        ids = [row["task_id"] for row in curriculum.chosen_rows(num)]
        for place, task_id in enumerate(ids):
            kind = (luck + place) % 5
            trouble = "infrastructure" if kind == 4 else ""
            curriculum.learn([TaskOutcome(task_id, kind == 1, trouble)] * (1 + luck % 9))
        ids += [row["task_id"] for row in curriculum.fresh_rows(1, without_signal=[])]
        drawn.append(ids)
    return drawn


moves = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 40)), max_size=12)


@settings(max_examples=40)
@given(moves, moves)
def test_a_state_that_went_through_json_draws_what_the_original_draws(before: Any, later: Any) -> None:
    whole = make()
    play(whole, before)
    restored = make()
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert restored.state_dict() == whole.state_dict()
    assert restored.standings == whole.standings
    assert play(restored, later) == play(whole, later)
    assert restored.state_dict() == whole.state_dict()


def saved() -> dict[str, Any]:
    curriculum = make()
    play(curriculum, [(2, 3), (2, 8), (1, 4)])
    state: dict[str, Any] = json.loads(json.dumps(curriculum.state_dict()))
    return state


def test_what_was_saved_of_something_else_is_refused() -> None:
    for state in ({}, {"version": 1, "tasks": {}}, {"epoch": 0, "position": 3, "num_rows": 4}):
        with pytest.raises(InputError, match="CR0884"):
            make().load_state_dict(state)
    with pytest.raises(InputError, match=r"CR0884.*'store'.*'other'"):
        make(fingerprint="other").load_state_dict(saved())
    for task_ids in ([*TASKS, "t9"], TASKS[1:], [*TASKS[1:], "x"]):
        with pytest.raises(InputError, match="CR0884"):
            make(task_ids=task_ids).load_state_dict(saved())


def spoil(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        *inner, last = path
        for key in inner:
            state = state[key]
        if value is ...:
            del state[last]
        else:
            state[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        spoil("generation", value=1.5),
        spoil("num_draws", value=True),
        spoil("in_batch", value=["nobody"]),
        spoil("pending", value=[["nobody", True, ""]]),
        spoil("tasks", "t0", value=[]),
        spoil("tasks", "t0", "status", value="asleep"),
        spoil("tasks", "t0", "passed", value=...),
        spoil("tasks", "t0", "passed", value=math.nan),
        spoil("tasks", "t0", "failed", value=math.inf),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change: Callable[[dict[str, Any]], None]) -> None:
    state = saved()
    good = copy.deepcopy(state)
    change(state)
    curriculum = make()
    before = curriculum.state_dict()
    with pytest.raises(InputError, match="CR0884"):
        curriculum.load_state_dict(state)
    assert curriculum.state_dict() == before
    curriculum.load_state_dict(good)


# ---- recorded pass rates ------------------------------------------------------------------------------


def policy(name: str) -> MeasuredPolicy:
    return MeasuredPolicy(name, f"sha of {name}", 1.0, "completion", 12, 64)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """``own`` was asked about t0 alone, twice; ``other`` about t0 and t1."""
    for seed, num_passed in ((0, 10), (1, 2)):
        record_difficulty(tmp_path, seed, [Difficulty("t0", policy("own"), 16, num_passed, None)])
    other = [Difficulty("t0", policy("other"), 4, 4, None), Difficulty("t1", policy("other"), 4, 1, 0)]
    record_difficulty(tmp_path, 0, other)
    return tmp_path


def read(root: Path) -> dict[str, Standing]:
    return recorded_standings(root, parameter_sha256=lambda: "sha of own")


def test_the_own_weights_win_and_the_weight_is_capped(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(measured) == {"t0": standing(3.0, 5.0), "t1": standing(1.0, 3.0)}
    monkeypatch.setattr("composer_replication.rollouts.curriculum.RECORDED_WEIGHT", 100.0)
    assert read(measured)["t0"] == standing(12.0, 20.0)
    monkeypatch.setattr("composer_replication.rollouts.curriculum.RECORDED_WEIGHT", 2.0)
    assert read(measured) == {"t0": standing(0.75, 1.25), "t1": standing(0.5, 1.5)}


def test_a_damaged_measurement_is_named(measured: Path) -> None:
    next((measured / "difficulty").glob("own*")).write_text("{")
    with pytest.raises(InputError, match="CR0411"):
        read(measured)
