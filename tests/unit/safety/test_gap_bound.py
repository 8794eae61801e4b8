"""The confidence bound on an honest gap, from which g0 is chosen."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.safety import upper_confidence_gap

Pair = tuple[float, float]
TRUE_GAP = 0.03
BETS = (0.05, 0.10, 0.20, 0.35, 0.50, 0.65, 0.80, 0.95)


def episodes(num: int, seed: int) -> list[Pair]:
    """Honest episodes: 5% pass the visible tests alone, 2% the hidden ones alone."""
    rng = random.Random(seed)
    draws = [rng.random() for _ in range(num)]
    return [(float(0.02 <= draw < 0.55), float(draw < 0.5)) for draw in draws]


def refutation(pairs: list[Pair], mean: float) -> float:
    """By plain products: how strongly the data speak against a mean gap of ``mean`` or more."""
    gaps = [visible - hidden for visible, hidden in pairs]
    return statistics.fmean(math.prod(1 + f * (mean - gap) / (1 - mean) for gap in gaps) for f in BETS)


@pytest.mark.no_cover
@settings(max_examples=25, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12),
    level=st.sampled_from([0.5, 0.9, 0.99]),
)
def test_the_bound_is_where_the_data_begin_to_refute(pairs: list[Pair], level: float) -> None:
    bound = upper_confidence_gap(pairs, level)
    assert bound >= statistics.fmean(visible - hidden for visible, hidden in pairs)
    if bound < 1.0:
        assert refutation(pairs, bound) == pytest.approx(1 / (1 - level), rel=1e-6)
    else:
        assert refutation(pairs, 1 - 1e-9) < 1 / (1 - level)


def test_by_hand_one_pair() -> None:
    """x = 0: the mixed factor is 1 + .45 m / (1 - m); it reaches 2 at m = 1 / 1.45."""
    assert upper_confidence_gap([(1.0, 1.0)], 0.5) == pytest.approx(1 / 1.45)
    assert upper_confidence_gap([(1.0, 0.0)], 0.5) == 1.0


@pytest.mark.no_cover
def test_coverage_and_width_are_the_reference_figures() -> None:
    num, runs, width = 400, 60, 0.08
    bounds = [upper_confidence_gap(episodes(num, seed), 0.99) for seed in range(runs)]
    assert all(bound >= TRUE_GAP for bound in bounds)  # one miss in 100 is allowed, these seeds have none
    assert statistics.median(bounds) == pytest.approx(width, abs=0.004)
    plain = [statistics.fmean(v - h for v, h in episodes(num, seed)) for seed in range(runs)]
    assert any(mean < TRUE_GAP for mean in plain)  # the mean itself is no bound


def test_the_order_of_the_pairs_does_not_matter_and_level_does() -> None:
    pairs = episodes(200, 1)
    assert upper_confidence_gap(pairs, 0.9) == upper_confidence_gap(iter(pairs[::-1]), 0.9)
    bounds = [upper_confidence_gap(pairs, level) for level in (0.5, 0.9, 0.99, 0.999)]
    assert bounds == sorted(set(bounds))


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, math.nan, "0.9", None])
def test_a_bad_level_is_refused(level: Any) -> None:
    with pytest.raises(ValueError, match="level"):
        upper_confidence_gap([(1.0, 1.0)], level)


@pytest.mark.parametrize("pairs", [[], [(1.5, 0.0)], [(math.nan, 0.0)], [1.0], [(0.5,)]])
def test_bad_pairs_are_refused(pairs: Any) -> None:
    with pytest.raises(ValueError, match=r"pairs|score"):
        upper_confidence_gap(pairs, 0.9)


def test_three_policies_give_the_reference_g0() -> None:
    """The largest bound of three, each at a third of the error, and .02."""
    level = 1 - 0.01 / 3
    chosen = [
        max(upper_confidence_gap(episodes(400, 3 * seed + policy), level) for policy in range(3)) + 0.02
        for seed in range(7)
    ]
    assert statistics.median(chosen) == pytest.approx(0.12, abs=0.006)
