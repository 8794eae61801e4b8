"""The vectorised evidence detector against reference values and against the one that ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_replication.report.bench_evidence import (
    EvidenceSimulator,
    gap_growth,
    log_threshold,
    weight,
)
from composer_replication.safety import EvidenceGuard

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "evidence_series.json").read_text())["series"]
LEVELS = 4  # scores of the golden series are multiples of a quarter
TOLERANCE = 1e-9


def counted(values: list[float], lowest: int) -> np.ndarray:
    counts = np.zeros((LEVELS - lowest + 1, 1), dtype=np.int64)
    for value in values:
        counts[round(value * LEVELS) - lowest] += 1
    return counts


def simulated(series: dict[str, Any], **changed: float) -> tuple[float, int | None]:
    """The largest difference from the golden values, and the alarm."""
    settings = {name: series[name] for name in ("planned_evaluations", "tolerated_gap", "delta", "eps0")}
    simulator = EvidenceSimulator(1, alphas=(series["alpha"],), num_levels=LEVELS, **{**settings, **changed})
    largest, alarm = 0.0, None
    for row, expected in zip(series["evaluations"], series["expected"], strict=True):
        gaps = [v - h for v, h in zip(row["visible"], row["hidden"], strict=True)]
        simulator.update(counted(gaps, -LEVELS), counted(row["hidden"], 0), counted(row["canary"], 0))
        own = [
            simulator.log_evidence_AR[0, 0],
            *simulator.log_streams_AJR[0, :, 0],
            simulator.lower_bound[0, 0],
        ]
        golden = [expected["log_evidence"], *expected["streams"], expected["lcb"]]
        largest = max(largest, *(abs(one - other) for one, other in zip(own, golden, strict=True)))
        if alarm is None and own[0] >= log_threshold(series["alpha"]):
            alarm = simulator.step
    return largest, alarm


@pytest.mark.parametrize("series", GOLDEN, ids=lambda series: str(series["name"]))
def test_every_golden_figure_and_alarm_agrees(series: dict[str, Any]) -> None:
    difference, alarm = simulated(series)
    assert difference < TOLERANCE
    assert alarm == series["fired_at"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("tolerated_gap", 0.051), ("delta", 0.08), ("eps0", 0.0051), ("planned_evaluations", 61)],
)
def test_another_setting_does_not_agree(name: str, value: float) -> None:
    assert max(simulated(series, **{name: value})[0] for series in GOLDEN) > 1e-4


def test_it_equals_the_guard_that_ships_in_every_run() -> None:
    """Twelve runs at once, two error levels, hacked in the middle, beyond the plan."""
    rng = np.random.default_rng(5)
    num_runs, num_tasks, alphas = 12, 10, (0.01, 0.1)
    settings = {"planned_evaluations": 25, "tolerated_gap": 0.04}
    simulator = EvidenceSimulator(num_runs, alphas=alphas, **settings)
    guards = [[EvidenceGuard(alpha=alpha, **settings) for _ in range(num_runs)] for alpha in alphas]
    for step in range(1, 41):
        hidden_RN = rng.random((num_runs, num_tasks)) < (0.8 if step < 20 else 0.5)
        visible_RN = hidden_RN | (rng.random((num_runs, num_tasks)) < 0.1)
        visible_RN &= rng.random((num_runs, num_tasks)) > 0.05
        canary_RC = rng.random((num_runs, 4)) < 0.02
        gaps_RN = visible_RN.astype(int) - hidden_RN
        simulator.update(
            np.stack([(gaps_RN == value).sum(axis=1) for value in (-1, 0, 1)]),
            np.stack([(hidden_RN == value).sum(axis=1) for value in (0, 1)]),
            np.stack([(canary_RC == value).sum(axis=1) for value in (0, 1)]),
        )
        for level, row in enumerate(guards):
            for run, guard in enumerate(row):
                pairs = zip(visible_RN[run].astype(float), hidden_RN[run].astype(float), strict=True)
                status = guard.update(step, pairs, canary_RC[run].astype(float))
                own = simulator.log_streams_AJR[level, :, run]
                assert own == pytest.approx(list(status.streams.values()), abs=TOLERANCE)
                assert simulator.log_evidence_AR[level, run] == pytest.approx(
                    status.log_evidence, abs=TOLERANCE
                )
                assert simulator.lower_bound[level, run] == status.lower_bound
    bounds = {guard.last_status.lower_bound for row in guards for guard in row}
    assert len(bounds) > 2  # the bound moved, and not alike everywhere


def test_weights_sum_to_one_and_growth_is_the_formula() -> None:
    assert sum(weight(step, 30) for step in range(1, 31)) == pytest.approx(0.9)
    assert sum(weight(step, 30) for step in range(1, 300_000)) == pytest.approx(1.0, abs=1e-4)
    growth = gap_growth(0.05, 1)
    assert growth.shape == (8, 3)
    assert growth[4] == pytest.approx(
        [np.log(0.5), np.log(1 - 0.5 * 0.05 / 1.05), np.log(1 + 0.5 * 0.95 / 1.05)]
    )


def test_overwhelming_evidence_stays_a_number() -> None:
    simulator = EvidenceSimulator(1, planned_evaluations=10, tolerated_gap=0.05)
    everything = np.array([[0], [0], [200]])
    for _ in range(20):
        simulator.update(everything, np.array([[200], [0]]), np.array([[0], [4]]))
    assert np.isfinite(simulator.log_evidence_AR).all()
    assert simulator.log_evidence_AR[0, 0] > 600.0
