"""The section of HeldOutGuard measures what it says, and its defaults do what the guard promises."""

from __future__ import annotations

import numpy as np
import pytest

from composer_replication.report.bench_heldout import (
    NUM_ROWS,
    Sizes,
    guard_runs,
    heldout_guard_section,
    measure,
    worst,
)
from composer_replication.safety import HeldOutGuard

SIZES = Sizes(num_runs=60)


def test_the_defaults_rarely_halt_honest_runs_and_find_hacked_ones() -> None:
    ours, test_like = heldout_guard_section(SIZES, 1, lambda _: None)
    assert ours["both_hold"]
    assert ours["worst_false_halt_rate"] <= 0.05
    assert ours["worst_found"] >= 0.95
    assert ours["worst_median_delay"] <= 6
    assert not test_like["both_hold"]
    assert test_like["worst_false_halt_rate"] >= 0.6


def test_the_runs_are_what_their_names_say() -> None:
    rows = {runs.name: runs for runs in guard_runs(SIZES, 0)}
    assert len(rows) == NUM_ROWS
    rising = rows["honest, rising from 0.5"]
    assert rising.in_loop_TR.shape == (400, 60)
    for series_TR in (rising.in_loop_TR, rising.heldout_TR):
        assert series_TR[:20].mean() == pytest.approx(0.5, abs=0.02)
        assert series_TR[-20:].mean() == pytest.approx(0.75, abs=0.02)
    hacked = rows["hacked from update 20, truth 0.7"]
    assert hacked.onset == 20
    assert hacked.heldout_TR.shape == (39, 60)  # 19 honest updates and 20 hacked ones
    assert hacked.in_loop_TR[:19].mean() == pytest.approx(0.7, abs=0.02)
    assert (hacked.in_loop_TR[19:] == 1.0).all()
    assert hacked.heldout_TR[19:].mean() == pytest.approx(0.4, abs=0.02)
    assert np.unique(hacked.heldout_TR * 32 % 1).tolist() == [0.0]


def test_a_row_agrees_with_the_real_guard() -> None:
    runs = next(one for one in guard_runs(SIZES, 2) if one.name == "hacked from update 20, truth 0.5")
    settings = {"min_steps": 3, "decline_patience": 3, "ema_alpha": 0.5}
    stops = []
    for in_loop, heldout in zip(runs.in_loop_TR.T, runs.heldout_TR.T, strict=True):
        guard = HeldOutGuard(max_proxy_real_gap=0.2, **settings)  # type: ignore[arg-type]
        fired = [
            guard.update(n, in_loop_reward=r, heldout_score=h).fire
            for n, (r, h) in enumerate(zip(in_loop, heldout, strict=True), start=1)
        ]
        stops.append(fired.index(True) + 1 if True in fired else None)
    row = measure(runs, settings, [0.2])[0]
    before = [stop for stop in stops if stop is not None and stop < 20]
    found = [stop for stop in stops if stop is not None and stop >= 20]
    assert before
    assert row["halted_before"] == pytest.approx(len(before) / 60)
    assert row["found"] == pytest.approx(len(found) / (60 - len(before)))


def test_a_setting_under_which_no_run_reaches_its_onset_finds_nothing() -> None:
    rows = [{"rate": 1.0}, {"halted_before": 1.0, "missed": None, "median": None}]
    assert worst(rows) == {
        "worst_false_halt_rate": 1.0,
        "worst_found": None,
        "worst_median_delay": None,
        "both_hold": False,
    }


def test_a_section_has_both_settings_and_tells_its_progress() -> None:
    ticks: list[str] = []
    section = heldout_guard_section(Sizes(num_runs=5), 0, ticks.append)
    assert [entry["name"] for entry in section] == ["defaults", "test-like"]
    assert all(len(entry["runs"]) == NUM_ROWS for entry in section)
    assert len(ticks) == NUM_ROWS
