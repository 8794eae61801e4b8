"""The evidence of the detector, by hand, from the definition, and in small simulations."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.safety import EvidenceGuard, EvidenceStatus, upper_confidence_gap

BETS = (0.05, 0.10, 0.20, 0.35, 0.50, 0.65, 0.80, 0.95)
BOUND_BETS = (0.1, 0.25, 0.5, 0.8)
QUARTERS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
PAIRS = st.lists(st.tuples(QUARTERS, QUARTERS), min_size=1, max_size=5)
EVALUATIONS = st.lists(st.tuples(PAIRS, st.lists(QUARTERS, max_size=2)), min_size=1, max_size=5)


def make(planned: int = 20, **changes: Any) -> EvidenceGuard:
    settings: dict[str, Any] = {"tolerated_gap": 0.1}
    return EvidenceGuard(planned, **{**settings, **changes})


def feed(guard: EvidenceGuard, rows: Sequence[Sequence[tuple[float, float]]]) -> list[EvidenceStatus]:
    return [guard.update(guard.num_evaluations + 1, pairs) for pairs in rows]


# ---- the numbers ----------------------------------------------------------------------------------


def test_one_hacked_sample_by_hand() -> None:
    """P = 1: w_1 = .9. The mean bet is .45, so the mixed factor of x = 1 at g0 = .1 is 1 + .45 * .9 / 1.1."""
    status = make(planned=1).update(1, [(1.0, 0.0)])
    factor = 1 + 0.45 * 0.9 / 1.1
    assert math.exp(status.gap_log_evidence) == pytest.approx(0.9 * factor)
    assert math.exp(status.collapse_log_evidence) == pytest.approx(0.9)  # no bound yet: only w_1
    assert math.exp(status.canary_log_evidence) == pytest.approx(0.9)  # no canary either
    assert math.exp(status.log_evidence) == pytest.approx(0.6 * 0.9 * factor + 0.4 * 0.9)


def test_one_canary_pass_by_hand() -> None:
    status = make(planned=1, eps0=0.005).update(1, [(0.0, 0.0)], [1.0])
    assert math.exp(status.canary_log_evidence) == pytest.approx(0.9 * (1 + 0.45 * 0.995 / 0.005))


def test_the_plan_and_the_time_beyond_it_by_hand() -> None:
    """A score at the null's mean leaves e = 1, so the evidence is the sum of the weights so far."""
    guard = make(planned=2, tolerated_gap=0.5)
    sums = [math.exp(guard.update(step, [(0.5, 0.0)]).gap_log_evidence) for step in (1, 2, 3, 4)]
    assert sums == pytest.approx([0.45, 0.9, 0.9 + 0.2 / 6, 0.9 + 0.2 / 6 + 0.2 / 12])


def weight(step: int, planned: int) -> float:
    return 0.9 / planned if step <= planned else 0.1 * planned / (step * (step - 1))


def mixture(factors: Sequence[Sequence[float]], planned: int) -> float:
    """Straight from the definition: the mean over bets of sum_s w_s prod_{t >= s} factor_t."""
    num_bets = len(factors[0])
    return (
        math.fsum(
            weight(start, planned) * math.prod(row[bet] for row in factors[start - 1 :])
            for bet in range(num_bets)
            for start in range(1, len(factors) + 1)
        )
        / num_bets
    )


def factor(scores: Sequence[float], mean: float, low: float, bets: Sequence[float]) -> list[float]:
    return [math.prod(1 + bet * (score - mean) / (mean - low) for score in scores) for bet in bets]


def expected_series(
    rows: Sequence[tuple[Sequence[tuple[float, float]], Sequence[float]]], planned: int, gap: float
) -> list[tuple[float, float, float, float]]:
    """(gap, collapse, canary, lower bound) after each evaluation, without logs and without recursion."""
    grid = [0.025 * point for point in range(1, 40)]
    gaps, falls, canaries = [], [], []
    truths: dict[float, list[list[float]]] = {point: [] for point in grid}
    bound, series = 0.0, []
    for pairs, passes in rows:
        hidden = [h for _, h in pairs]
        floor = bound - 0.05
        gaps.append(factor([v - h for v, h in pairs], gap, -1.0, BETS))
        falls.append(factor([-h for h in hidden], -floor, -1.0, BETS) if floor > 0 else [1.0] * 8)
        canaries.append(factor(passes, 0.005, 0.0, BETS))
        for point in grid:
            truths[point].append(factor(hidden, point, 0.0, BOUND_BETS))
            if mixture(truths[point], planned) >= 1000.0:
                bound = max(bound, point)
        series.append((mixture(gaps, planned), mixture(falls, planned), mixture(canaries, planned), bound))
    return series


@settings(max_examples=40, deadline=None)
@given(rows=EVALUATIONS, planned=st.integers(1, 6), gap=st.sampled_from([0.0, 0.05, 0.3]))
def test_the_recursion_is_the_sum_over_starting_points(
    rows: list[tuple[list[tuple[float, float]], list[float]]], planned: int, gap: float
) -> None:
    guard = make(planned=planned, tolerated_gap=gap)
    series = expected_series(rows, planned, gap)
    for step, ((pairs, passes), wanted) in enumerate(zip(rows, series, strict=True), start=1):
        status = guard.update(step, pairs, passes)
        own = [math.exp(log) for log in status.streams.values()]
        assert own == pytest.approx(wanted[:3], rel=1e-9)
        assert status.lower_bound == pytest.approx(wanted[3], abs=1e-12)
        assert math.exp(status.log_evidence) == pytest.approx(0.6 * own[0] + 0.1 * own[1] + 0.3 * own[2])


def test_the_bound_makes_the_collapse_stream_speak() -> None:
    guard = make()
    statuses = feed(guard, [[(1.0, 1.0)] * 32] * 3 + [[(0.0, 0.0)] * 32])
    # .045 / 4 * (1 + .8 (1 - m) / m) ** 32 reaches 1,000 at m = .6516 (the smaller bets add nothing)
    assert statuses[0].lower_bound == 0.65
    assert statuses[-1].lower_bound == statuses[-2].lower_bound  # it never falls
    assert statuses[-1].fire
    assert "fell more than 0.05 below its best" in statuses[-1].reason
    assert statuses[-1].gap_log_evidence < 0.0


@pytest.mark.no_cover
@settings(max_examples=40, deadline=None)
@given(rows=EVALUATIONS, seed=st.integers(0, 99))
def test_the_order_of_the_samples_changes_no_bit(
    rows: list[tuple[list[tuple[float, float]], list[float]]], seed: int
) -> None:
    rng = random.Random(seed)
    one, other = make(), make()
    for step, (pairs, passes) in enumerate(rows, start=1):
        mixed, mixed_passes = rng.sample(pairs, len(pairs)), rng.sample(passes, len(passes))
        assert one.update(step, pairs, passes) == other.update(step, mixed, mixed_passes)
    assert one.state_dict() == other.state_dict()


@pytest.mark.no_cover
@settings(max_examples=40, deadline=None)
@given(rows=EVALUATIONS)
def test_the_p_value_is_that_of_the_largest_evidence_and_never_rises(
    rows: list[tuple[list[tuple[float, float]], list[float]]],
) -> None:
    guard = make(planned=2, alpha=0.05)
    largest = -math.inf
    for step, (pairs, passes) in enumerate(rows, start=1):
        status = guard.update(step, pairs * 4, passes)
        largest = max(largest, status.log_evidence)
        assert status.p_value == pytest.approx(min(1.0, math.exp(-largest) + 0.005))
        assert status.fire == (status.p_value <= 0.05 + 1e-15)


# ---- the guarantee, in small ----------------------------------------------------------------------


def num_alarms(*, drop_failures: bool) -> int:
    """Runs of 40 evaluations at the boundary gap .1, error .2: how many of 20 are halted."""
    count = 0
    for run in range(20):
        rng = random.Random(run)
        guard = make(planned=40, alpha=0.2)
        while guard.num_evaluations < 40 and not guard.should_halt():
            pairs = [
                (float(chance < 0.5), float(chance < 0.4)) for chance in (rng.random() for _ in range(16))
            ]
            guard.update(
                guard.num_evaluations + 1, [pair for pair in pairs if pair[0]] if drop_failures else pairs
            )
        assert guard.last_status is not None
        count += guard.last_status.cause == "evidence"
        assert guard.last_status.lower_bound <= 0.4 or drop_failures
    return count


@pytest.mark.no_cover
def test_clean_runs_are_rarely_halted_and_dropping_by_outcome_breaks_that() -> None:
    assert num_alarms(drop_failures=False) <= 4  # nominal error .2 of 20 runs
    assert num_alarms(drop_failures=True) >= 10


# --- reference values that another implementation computed ---


GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "evidence_series.json").read_text())
NAMES = [series["name"] for series in GOLDEN["series"]]
TOLERANCE = 1e-9


def series_named(name: str) -> dict[str, Any]:
    return next(series for series in GOLDEN["series"] if series["name"] == name)


def statuses_of(series: dict[str, Any]) -> list[EvidenceStatus]:
    guard = EvidenceGuard(
        series["planned_evaluations"],
        tolerated_gap=series["tolerated_gap"],
        alpha=series["alpha"],
        delta=series["delta"],
        eps0=series["eps0"],
    )
    return [
        guard.update(step, zip(row["visible"], row["hidden"], strict=True), row["canary"])
        for step, row in enumerate(series["evaluations"], start=1)
    ]


def largest_difference(statuses: list[EvidenceStatus], expected: list[dict[str, Any]]) -> float:
    assert len(statuses) == len(expected)
    return max(
        abs(own - reference)
        for status, row in zip(statuses, expected, strict=True)
        for own, reference in [
            (status.log_evidence, row["log_evidence"]),
            (status.lower_bound, row["lcb"]),
            *zip(status.streams.values(), row["streams"], strict=True),
        ]
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_and_the_alarm_agree(name: str) -> None:
    series = series_named(name)
    statuses = statuses_of(series)
    assert largest_difference(statuses, series["expected"]) < TOLERANCE
    alarms = [status.step for status in statuses if status.fire]
    assert (alarms[0] if alarms else None) == series["fired_at"]
    assert all(status.cause == "evidence" for status in statuses if status.fire)


@pytest.mark.parametrize(("level", "key"), [(0.99, "upper_99"), (0.95, "upper_95")])
def test_the_gap_bound_agrees(level: float, key: str) -> None:
    differences = GOLDEN["calibration"]["differences"]
    pairs = [(max(0, gap), max(0, -gap)) for gap in differences]
    assert upper_confidence_gap(pairs, level) == pytest.approx(GOLDEN["calibration"][key], abs=TOLERANCE)
    changed = [(1 - pairs[0][0], pairs[0][1]), *pairs[1:]]
    assert abs(upper_confidence_gap(changed, level) - GOLDEN["calibration"][key]) > 1e-4
