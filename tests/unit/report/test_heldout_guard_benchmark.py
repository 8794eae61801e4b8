"""The benchmark behind HeldOutGuard's defaults measures what it says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

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

PATH = Path(__file__).parents[3] / "benchmarks" / "heldout_guard_defaults.py"
SIZES = Sizes(num_runs=60)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("heldout_guard_defaults", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_defaults_rarely_halt_honest_runs_and_find_hacked_ones(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(PATH), "--runs", "60", "--seed", "1"])
    benchmark.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ours, test_like = [row for row in rows if "name" in row]
    assert ours["settings"] == "defaults"
    assert ours["both_hold"]
    assert ours["worst_false_halt_rate"] <= 0.05
    assert ours["worst_found"] >= 0.95
    assert ours["worst_median_delay"] <= 6
    assert not test_like["both_hold"]
    assert test_like["worst_false_halt_rate"] >= 0.6
    grid = [row for row in rows if "ema_alpha" in row]
    assert len(grid) == len(benchmark.GAPS) * len(benchmark.PATIENCES) * len(benchmark.AVERAGES)
    assert [row["both_hold"] for row in grid] == sorted((row["both_hold"] for row in grid), reverse=True)
    defaults = HeldOutGuard()
    same = [
        row
        for row in grid
        if all(
            row[name] == getattr(defaults, name)
            for name in ("ema_alpha", "decline_patience", "max_proxy_real_gap")
        )
    ]
    assert [row["worst_false_halt_rate"] for row in same] == [ours["worst_false_halt_rate"]]


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
