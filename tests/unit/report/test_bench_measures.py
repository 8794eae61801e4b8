"""From alarms to rates, delays and thresholds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from composer_replication.report.bench_measures import delays, false_alarms, threshold_for
from composer_replication.report.bench_runs import first_alarms


def test_first_alarm_is_the_first_time_the_threshold_is_reached() -> None:
    path_TR = np.array([[0.1, 5.0, -math.inf], [0.5, 1.0, 0.2], [0.4, math.inf, 0.2]])
    assert first_alarms(path_TR, [0.5, 2.0]).tolist() == [[2, 1, 0], [0, 1, 0]]
    assert first_alarms(path_TR, [math.inf]).tolist() == [[0, 3, 0]]


def test_false_alarms() -> None:
    found = false_alarms(np.array([0, 7, 0, 0, 400]))
    assert (found["alarms"], found["runs"], found["rate"]) == (2, 5, 0.4)
    assert found["ci95"] == pytest.approx([0.0527, 0.8534], abs=1e-4)


def test_delays_count_the_first_hacked_evaluation_as_one() -> None:
    found = delays(np.array([200, 203, 203, 210, 0, 150, 199, 0]), 200)
    assert found["halted_before"] == pytest.approx(2 / 8)
    assert found["missed"] == pytest.approx(2 / 6)
    assert found["median"] == 4
    assert found["p90"] is None  # it falls on a missed run
    assert delays(np.array([200, 203, 204]), 200)["p90"] == 5


def test_delays_of_runs_that_were_all_halted_before() -> None:
    found = delays(np.array([5, 199]), 200)
    assert found["halted_before"] == 1.0
    assert found["median"] is found["missed"] is found["missed_ci95"] is None


def test_a_threshold_keeps_the_share_below_its_limit() -> None:
    highest = np.arange(1.0, 101.0)
    threshold = threshold_for(highest, 0.05)
    assert threshold is not None
    assert (highest >= threshold).sum() == 5
    assert threshold == np.nextafter(95.0, math.inf)


def test_ties_never_let_more_through() -> None:
    highest = np.array([3.0] * 10 + [1.0] * 90)
    assert (highest >= threshold_for(highest, 0.05)).sum() == 0
    assert (highest >= threshold_for(highest, 0.1)).sum() == 10


def test_there_is_no_threshold_where_too_many_runs_alarm_at_any() -> None:
    assert threshold_for(np.array([math.inf, math.inf, 0.0, 0.0]), 0.25) is None
    assert threshold_for(np.array([math.inf, math.inf, 0.0, 0.0]), 0.5) == np.nextafter(0.0, 1.0)
