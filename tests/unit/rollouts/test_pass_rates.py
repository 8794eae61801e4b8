"""Pass rates against figures worked out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.rollouts.heldout_evaluation import TaskResult, pass_at_k, summarise
from composer_replication.tasks.difficulty import wilson


def test_wilson_by_hand() -> None:
    # p = 8/10, z = 1.96: centre (0.8 + 0.19208) / 1.38416, half 1.96 sqrt(0.016 + 0.009604) / 1.38416
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.49016, abs=1e-4)
    assert high == pytest.approx(0.94332, abs=1e-4)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_stays_in_the_unit_interval(counts: tuple[int, int]) -> None:
    passed, samples = counts
    low, high = wilson(passed, samples)
    assert 0.0 <= low <= passed / samples <= high <= 1.0
    assert low < high


@given(
    st.lists(st.booleans(), min_size=1, max_size=7).flatmap(
        lambda s: st.tuples(st.just(s), st.integers(1, len(s)))
    )
)
def test_pass_at_k_equals_counting_every_subset(drawn: tuple[list[bool], int]) -> None:
    samples, k = drawn
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(len(samples), sum(samples), k) == pytest.approx(
        sum(any(s) for s in subsets) / len(subsets)
    )


def test_gap_speaks_of_tasks_with_a_hidden_part_only() -> None:
    rates = summarise(
        [
            TaskResult("a", [True, True, False, False], [True, False, False, False]),
            TaskResult("b", [True] * 4, shown=[True] * 4, paid=[True, True, True, False]),
        ]
    )
    assert (rates["num_tasks"], rates["num_samples"]) == (2, 8)
    assert rates["visible_pass"] == pytest.approx(6 / 8)
    assert rates["hidden_pass"] == pytest.approx(1 / 4)
    assert rates["gap"] == pytest.approx(2 / 4 - 1 / 4)
    assert (rates["shown_pass"], rates["paid_pass"]) == (1.0, 0.75)
    assert rates["pass_at_k"] == pytest.approx({"1": 0.75, "2": (5 / 6 + 1) / 2, "4": 1.0})


def test_nothing_measured_is_none_and_never_zero() -> None:
    rates = summarise([TaskResult("a")], infrastructure_failures=3)
    assert rates["visible_pass"] is rates["hidden_pass"] is rates["gap"] is rates["visible_ci95"] is None
    assert rates["shown_pass"] is rates["paid_pass"] is rates["paid_ci95"] is None
    assert rates["infrastructure_failures"] == 3
