"""The detector and the gap bound against reference values that another implementation computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_replication.safety import EvidenceGuard, EvidenceStatus, upper_confidence_gap

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
