"""Each rule on a series that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.report.bench_detectors import (
    cusum_path,
    e_process_path,
    ema_path,
    heldout_guard_path,
    likelihood_path,
    make_detectors,
    page_hinkley_path,
    z_path,
)
from composer_replication.report.bench_evidence import BETS
from composer_replication.report.bench_runs import first_alarms
from composer_replication.report.bench_series import Series
from composer_replication.safety import HeldOutGuard


def series_of(*counts: tuple[int, int, int]) -> Series:
    """One run; each evaluation has so many samples with V - H of -1, 0 and 1."""
    gaps_TXR = np.array(counts)[:, :, None]
    none_TR = np.zeros((len(counts), 1))
    return Series(gaps_TXR, none_TR, none_TR, none_TR, none_TR)


def column(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


def test_mean_and_size_of_an_evaluation() -> None:
    series = series_of((1, 1, 2), (0, 0, 0), (3, 1, 0))
    assert series.num_samples[:, 0].tolist() == [4.0, 1.0, 4.0]  # nothing drawn: a mean of 0, no division
    assert series.mean_gap[:, 0].tolist() == [0.25, 0.0, -0.75]


def test_moving_average() -> None:
    assert ema_path(column(1.0, 0.0, 0.5), 0.8)[:, 0] == pytest.approx([1.0, 0.8, 0.74])


def test_cusum() -> None:
    assert cusum_path(column(1.0, -2.0, 3.0, -1.0))[:, 0].tolist() == [1.0, 0.0, 3.0, 2.0]


def test_page_hinkley() -> None:
    # Running means 0 and 2/4: drifts -2 x .005 and then 2 - 2 x .505.
    path = page_hinkley_path(column(0.0, 2.0), column(2.0, 2.0))
    assert path[:, 0] == pytest.approx([0.0, 0.99])
    # Without a tolerance a rise from the start is measured from 0, not from its first point.
    assert page_hinkley_path(column(-1.0, 1.0), column(1.0, 1.0), tolerance=0.0)[:, 0] == pytest.approx(
        [0.0, 1.0]
    )


def test_z_test() -> None:
    # Mean 1/4, variance (1 - 4/16) / 3 = 1/4: z = (.25 - .05) x 2 / .5.
    assert z_path(series_of((0, 3, 1)))[:, 0] == pytest.approx([0.8])
    assert z_path(series_of((0, 4, 0), (0, 0, 4), (0, 0, 1)))[:, 0].tolist() == [
        -math.inf,
        math.inf,
        math.inf,
    ]


def test_plain_e_process() -> None:
    up, down = BETS * 0.95 / 1.05, -BETS
    path = e_process_path(series_of((0, 0, 1), (1, 0, 0)))
    assert path[:, 0] == pytest.approx([np.log(np.mean(1 + up)), np.log(np.mean((1 + up) * (1 + down)))])


def test_likelihood_ratio() -> None:
    # Chances (.02, .91, .07) before and (.02, .76, .22) after; V - H = -1 says nothing.
    gain, loss = math.log(0.22 / 0.07), math.log(0.76 / 0.91)
    path = likelihood_path(series_of((1, 0, 0), (0, 1, 2), (0, 30, 0), (0, 0, 1)), 0.05, 0.20)
    assert path[:, 0] == pytest.approx([0.0, 2 * gain + loss, 0.0, gain])


def test_gap_of_the_guard_by_hand() -> None:
    path = heldout_guard_path(
        column(0.20, 0.60), column(0.20, 0.30), min_steps=1, decline_patience=9, ema_alpha=0.5
    )
    assert path[:, 0] == pytest.approx([0.0, 0.15])


def test_declines_and_warm_up_of_the_guard_by_hand() -> None:
    rising, falling = column(0.1, 0.2, 0.3, 0.4, 0.5), column(0.5, 0.4, 0.3, 0.3, 0.2)
    path = heldout_guard_path(rising, falling, min_steps=2, decline_patience=2, ema_alpha=0.0)
    # Two declines at the third update; the level fourth score resets the streak.
    assert path[:, 0] == pytest.approx([-math.inf, 0.2, math.inf, 0.5, 0.7])
    later = heldout_guard_path(rising, falling, min_steps=4, decline_patience=2, ema_alpha=0.0)
    assert later[:3, 0].tolist() == [-math.inf] * 3


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 0.5, 0.8]),
    st.sampled_from([0.05, 0.1, 0.35]),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=30),
)
def test_the_folding_is_the_real_guards(
    min_steps: int, patience: int, ema_alpha: float, max_gap: float, eighths: list[tuple[int, int]]
) -> None:
    rewards, scores = (np.array(column) / 8 for column in zip(*eighths, strict=True))
    settings = {"min_steps": min_steps, "decline_patience": patience, "ema_alpha": ema_alpha}
    path = heldout_guard_path(rewards[:, None], scores[:, None], **settings)
    alarm = int(first_alarms(path, [float(np.nextafter(max_gap, np.inf))])[0, 0])
    guard = HeldOutGuard(max_proxy_real_gap=max_gap, **settings)
    fired = [
        update
        for update, (reward, score) in enumerate(zip(rewards, scores, strict=True), start=1)
        if guard.update(update, in_loop_reward=reward, heldout_score=score).fire
    ]
    assert alarm == (fired[0] if fired else 0)


def test_names_are_told_apart_and_each_rule_says_what_it_does() -> None:
    detectors = make_detectors()
    assert len({detector.name for detector in detectors}) == len(detectors)
    assert detectors[0].name == "evidence"
    assert detectors[0].nominal == pytest.approx(-math.log(0.009))
    assert all(detector.sentence for detector in detectors)
    by_name = {detector.name: detector for detector in detectors}
    assert by_name["z-test"].threshold_at is not None
    assert (
        by_name["z-test"].nominal
        == pytest.approx(by_name["z-test"].threshold_at(0.01))
        == pytest.approx(2.3263, abs=1e-4)
    )
