"""What counts say of a pass rate, against numbers by hand and closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum import PRIOR, Standing


def posterior(a: float, b: float) -> Standing:
    return Standing(passed=a - PRIOR, failed=b - PRIOR, status="active")


@pytest.mark.parametrize(
    ("a", "b", "by_hand"),
    [
        (1.0, 1.0, 1 / 6),  # the integral of p - p^2 over [0, 1]
        (0.5, 0.5, 1 / 8),
        (2.0, 3.0, 6 / 30),
        (8.5, 0.5, 4.25 / 90),  # eight passes in eight attempts
        (4.5, 4.5, 20.25 / 90),
    ],
)
def test_expected_spread_by_hand(a: float, b: float, by_hand: float) -> None:
    assert posterior(a, b).weight == pytest.approx(by_hand, rel=1e-15)


@given(st.floats(0.5, 50.0), st.floats(0.5, 50.0))
def test_expected_spread_is_mean_times_complement_less_variance(a: float, b: float) -> None:
    """E[p(1-p)] = m(1-m) - Var p, with the textbook variance."""
    mean = a / (a + b)
    variance = mean * (1 - mean) / (a + b + 1)
    assert posterior(a, b).weight == pytest.approx(mean * (1 - mean) - variance, rel=1e-12)
    assert 0.0 < posterior(a, b).weight < 0.25


def test_certainty_of_large_counts_is_that_of_a_normal_distribution() -> None:
    a, b, low = 3000.0, 400.0, 0.88
    mean = a / (a + b)
    spread = math.sqrt(mean * (1 - mean) / (a + b + 1))
    normal = 0.5 * math.erfc((low - mean) / spread / math.sqrt(2))
    assert posterior(a, b).certainty_above(low) == pytest.approx(normal, abs=0.01)


@given(st.floats(0.5, 40.0), st.floats(0.5, 40.0), st.floats(0.05, 0.9), st.floats(0.001, 0.09))
def test_certainty_falls_as_the_rate_rises(a: float, b: float, rate: float, more: float) -> None:
    assert posterior(a, b).certainty_above(rate + more) <= posterior(a, b).certainty_above(rate)


# ---- evidence -----------------------------------------------------------------------------------------

ATTEMPTS = [
    TaskOutcome("t", True),
    TaskOutcome("t", False),
    TaskOutcome("t", False),
    TaskOutcome("t", False, "infrastructure"),
]


def test_only_full_passes_count_as_passes() -> None:
    known = posterior(2.0 + PRIOR, 1.0 + PRIOR).judged(ATTEMPTS)
    assert known == posterior(3.0 + PRIOR, 3.0 + PRIOR)
