"""Which tasks are drawn, retired and left alone, and that the same state draws the same."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum import Curriculum, Standing

NEVER_FADES = 1e9


def standing(passed: float = 0.0, failed: float = 0.0) -> Standing:
    return Standing(passed=passed, failed=failed, status="active")


def rows(num: int) -> list[dict[str, Any]]:
    return [{"prompt": f"write {n}", "task_id": f"t{n:02}"} for n in range(num)]


def make(
    num: int = 6, *, recorded: dict[str, Standing] | None = None, seed: int = 0, **options: Any
) -> Curriculum:
    kind = type("Changed", (Curriculum,), {"half_life": NEVER_FADES, **options})
    return kind(rows(num), seed=seed, fingerprint="store", recorded=recorded)


def names(drawn: Sequence[Any]) -> list[str]:
    return [row["task_id"] for row in drawn]


def passes(task_id: str, num: int, of: int = 8) -> list[TaskOutcome]:
    return [TaskOutcome(task_id, n < num) for n in range(of)]


def lost(task_id: str, num: int = 8) -> list[TaskOutcome]:
    return [TaskOutcome(task_id, False, "infrastructure")] * num


# ---- chances ------------------------------------------------------------------------------------------


counts = st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 60.0))


@given(st.lists(counts, min_size=1, max_size=12), st.floats(0.0, 1.0))
def test_chances_sum_to_one_and_none_is_below_the_floor(
    found: list[tuple[float, float]], floor: float
) -> None:
    recorded = {f"t{n:02}": standing(*pair) for n, pair in enumerate(found)}
    chances = make(len(found), recorded=recorded, floor_share=floor).probabilities()
    assert math.fsum(chances.values()) == pytest.approx(1.0, abs=1e-12)
    assert min(chances.values()) >= floor / len(found) * (1 - 1e-12)


def test_chances_by_hand() -> None:
    """Beta(4.5, 4.5) has 20.25/90, Beta(0.5, 8.5) has 4.25/90; a tenth is spread evenly."""
    chances = make(2, recorded={"t00": standing(4.0, 4.0), "t01": standing(0.0, 8.0)}).probabilities()
    assert chances["t00"] == pytest.approx(0.9 * 20.25 / 24.5 + 0.05)
    assert chances["t01"] == pytest.approx(0.9 * 4.25 / 24.5 + 0.05)


def test_draws_follow_the_chances() -> None:
    """4,000 first draws; three standard errors of each share."""
    curriculum = make(3, recorded={"t00": standing(5.0, 5.0), "t01": standing(0.0, 30.0)})
    chances, num = curriculum.probabilities(), 4000
    seen = Counter(names(curriculum.chosen_rows(1))[0] for _ in range(num))
    for task_id, chance in chances.items():
        assert abs(seen[task_id] / num - chance) < 3 * math.sqrt(chance * (1 - chance) / num)


# ---- draws --------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(0, 9))
def test_nothing_comes_twice_in_a_generation_replacements_included(
    seed: int, num: int, num_fresh: int
) -> None:
    curriculum = make(9, seed=seed)
    drawn = curriculum.chosen_rows(num)
    dull = drawn[:1]
    fresh = curriculum.fresh_rows(num_fresh, without_signal=dull)
    later = curriculum.fresh_rows(num_fresh, without_signal=dull)
    together = names([*drawn, *fresh, *later])
    assert len(set(together)) == len(together)
    assert len(drawn) == num
    assert len(fresh) == min(num_fresh, 9 - num)  # fewer only where there are no more
    assert len(curriculum.chosen_rows(9)) == 9  # the next generation begins anew


def played(curriculum: Curriculum, num: int, *, begin: int = 0) -> list[list[str]]:
    """Some generations with outcomes that depend on task and generation alone."""
    drawn = []
    for generation in range(begin, begin + num):
        first = names(curriculum.chosen_rows(3))
        fresh = names(curriculum.fresh_rows(2, without_signal=[{"task_id": first[0]}]))
        for task_id in (*first, *fresh):
            curriculum.learn(passes(task_id, (int(task_id[1:]) + generation) % 9))
        drawn.append([*first, *fresh])
    return drawn


def test_two_processes_with_the_same_history_draw_the_same() -> None:
    one, other = make(8, half_life=5.0), make(8, half_life=5.0)
    assert played(one, 20) == played(other, 20)
    assert one.state_dict() == other.state_dict()
    assert played(make(8, seed=1), 20) != played(make(8), 20)


def test_the_order_of_the_data_does_not_matter() -> None:
    backwards = type(make(half_life=5.0))(rows(8)[::-1], seed=0, fingerprint="store")
    assert played(backwards, 10) == played(make(8, half_life=5.0), 10)


@given(st.permutations([*passes("t00", 3), *passes("t01", 8), *lost("t02", 2), TaskOutcome("t01", False)]))
def test_the_order_of_outcomes_in_a_generation_does_not_matter(outcomes: list[TaskOutcome]) -> None:
    """Nor whether they come at once or one by one."""

    def after(parts: list[list[TaskOutcome]]) -> list[str]:
        curriculum = make(3, half_life=7.0)
        curriculum.chosen_rows(3)
        for part in parts:
            curriculum.learn(part)
        states = [json.dumps(curriculum.state_dict())]
        curriculum.chosen_rows(2)
        return [*states, json.dumps(curriculum.state_dict())]

    assert after([outcomes]) == after([[outcome] for outcome in sorted(outcomes, key=repr)])


# ---- learning -----------------------------------------------------------------------------------------


def test_outcomes_count_from_the_next_generation_on_and_fade() -> None:
    curriculum = make(2, half_life=1.0)
    curriculum.chosen_rows(1)
    curriculum.learn(passes("t00", 6))
    assert curriculum.standings["t00"] == standing()
    curriculum.chosen_rows(1)
    assert curriculum.standings["t00"] == standing(3.0, 1.0)
    curriculum.chosen_rows(1)
    assert curriculum.standings["t00"] == standing(1.5, 0.5)


@pytest.mark.parametrize(
    "given_rows", [[], [{"prompt": "p"}], [{"task_id": 3}], [{"task_id": "a"}, {"task_id": "a"}]]
)
def test_rows_without_a_task_of_their_own_are_refused(given_rows: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="CR0722"):
        Curriculum(given_rows, seed=0)


# ---- retired ------------------------------------------------------------------------------------------


def after(curriculum: Curriculum, outcomes: Sequence[TaskOutcome]) -> Curriculum:
    """One generation whose outcomes are counted."""
    curriculum.learn(outcomes)
    curriculum.chosen_rows(1)
    return curriculum


def status_of(curriculum: Curriculum, task_id: str = "t00") -> str:
    return curriculum.standings[task_id].status


def test_a_solved_task_retires_and_keeps_a_small_share() -> None:
    """P(p > 0.9) is about 0.88 after twelve passes of twelve and 0.96 after sixteen."""
    curriculum = after(make(4, revival_share=0.04), passes("t00", 12, of=12))
    assert status_of(curriculum) == "active"
    after(curriculum, passes("t00", 4, of=4))
    assert status_of(curriculum) == "retired"
    chances = curriculum.probabilities()
    assert chances["t00"] == pytest.approx(0.04)
    assert chances["t01"] == pytest.approx(0.96 / 3)


def test_retired_tasks_fill_a_generation_that_is_too_small_and_are_drawn_where_there_are_no_others() -> None:
    curriculum = after(make(2), passes("t00", 30, of=30))
    assert set(names(curriculum.chosen_rows(2))) == {"t00", "t01"}
    after(curriculum, passes("t01", 30, of=30))
    assert curriculum.figures()["curriculum/num_retired"] == 2.0
    assert curriculum.probabilities() == {"t00": 0.5, "t01": 0.5}
    assert len(curriculum.chosen_rows(2)) == 2


def test_a_retired_task_that_fails_again_comes_back() -> None:
    curriculum = after(make(half_life=2.0), passes("t00", 40, of=40))
    for _ in range(12):  # what is known of it fades, which alone brings nothing back
        curriculum.chosen_rows(1)
    assert status_of(curriculum) == "retired"
    after(curriculum, passes("t00", 8))
    assert status_of(curriculum) == "retired"
    after(curriculum, passes("t00", 5))
    assert status_of(curriculum) == "active"


def test_a_broken_sandbox_brings_no_retired_task_back() -> None:
    curriculum = after(make(half_life=1.0), passes("t00", 40, of=40))
    for _ in range(12):
        curriculum.chosen_rows(1)
    after(curriculum, lost("t00", 4))
    assert status_of(curriculum) == "retired"


def test_a_generation_of_more_tasks_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match=r"CR0760.*takes 4 tasks, and there are 3"):
        make(3).chosen_rows(4)


# ---- figures ------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    curriculum = make(5, recorded={"t03": standing(1.0, 3.0)}, floor_share=1.0, revival_share=0.1)
    assert curriculum.figures() == {
        "curriculum/num_active": 5.0,
        "curriculum/num_retired": 0.0,
        "curriculum/effective_tasks": pytest.approx(5.0),
        "curriculum/mean_pass_rate": 0.25,
    }
    half = [TaskOutcome("t02", False)] * 4
    after(curriculum, [*passes("t00", 40, of=40), *lost("t01", 20), *half])
    figures = curriculum.figures()
    assert [figures[f"curriculum/num_{name}"] for name in ("active", "retired")] == [4, 1]
    assert figures["curriculum/effective_tasks"] == pytest.approx(1 / (4 * 0.225**2 + 0.1**2))
    assert figures["curriculum/mean_pass_rate"] == pytest.approx((1 + 0 + 0.25) / 3)
