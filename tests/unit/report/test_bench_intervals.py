"""Clopper-Pearson against published intervals and against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.report.bench_intervals import clopper_pearson, tail_probability


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [
        # Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I.
        (81, 263, 0.2527, 0.3676),
        (15, 148, 0.0578, 0.1617),
        (0, 20, 0.0000, 0.1684),
        (1, 29, 0.0009, 0.1776),
    ],
)
def test_published_intervals(hits: int, trials: int, low: float, high: float) -> None:
    assert clopper_pearson(hits, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("trials", [1, 10, 367, 10_000])
def test_without_a_hit_the_upper_end_has_a_closed_form(trials: int) -> None:
    low, high = clopper_pearson(0, trials)
    assert low == 0.0
    assert high == pytest.approx(1.0 - 0.025 ** (1.0 / trials), rel=1e-9)
    assert clopper_pearson(trials, trials) == pytest.approx((1.0 - high, 1.0), rel=1e-9)


def test_eighty_alarms_of_ten_thousand_are_allowed_at_one_percent_and_no_more() -> None:
    assert clopper_pearson(80, 10_000)[1] < 0.01 < clopper_pearson(81, 10_000)[1]


def exact_tail(hits: int, trials: int, p: Fraction, step: int) -> Fraction:
    kept = range(hits, trials + 1) if step > 0 else range(hits + 1)
    return sum((math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in kept), Fraction(0))


@given(st.integers(1, 60), st.data(), st.integers(1, 99), st.sampled_from([1, -1]))
def test_tails_agree_with_exact_fractions(trials: int, data: st.DataObject, percent: int, step: int) -> None:
    hits = data.draw(st.integers(0, trials))
    p = Fraction(percent, 100)
    own = tail_probability(hits, trials, float(p), step=step)
    assert own == pytest.approx(float(exact_tail(hits, trials, p, step)), rel=1e-9, abs=1e-15)


@given(st.integers(1, 400), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_both_ends_leave_their_tail(trials: int, data: st.DataObject, level: float) -> None:
    hits = data.draw(st.integers(0, trials))
    low, high = clopper_pearson(hits, trials, level)
    assert 0.0 <= low <= hits / trials <= high <= 1.0
    if hits > 0:
        assert tail_probability(hits, trials, low, step=1) == pytest.approx((1 - level) / 2, rel=1e-6)
    if hits < trials:
        assert tail_probability(hits, trials, high, step=-1) == pytest.approx((1 - level) / 2, rel=1e-6)


def test_certain_chances() -> None:
    assert tail_probability(0, 5, 0.0, step=1) == tail_probability(5, 5, 1.0, step=1) == 1.0
    assert tail_probability(1, 5, 0.0, step=1) == tail_probability(4, 5, 1.0, step=-1) == 0.0


@pytest.mark.parametrize(
    ("hits", "trials", "level"), [(0, 0, 0.95), (-1, 5, 0.95), (6, 5, 0.95), (1, 5, 0.0), (1, 5, 1.0)]
)
def test_what_is_no_share_or_no_level_is_refused(hits: int, trials: int, level: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        clopper_pearson(hits, trials, level)
