"""The benchmarks of the evidence detector measure what they say."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_simulated_scores_have_the_stated_rates() -> None:
    delays = loaded("evidence_delays")
    pairs = delays.passes(0.1, 20_000, random.Random(0))
    assert statistics.fmean(visible - hidden for visible, hidden in pairs) == pytest.approx(0.1, abs=0.01)
    assert statistics.fmean(hidden for _, hidden in pairs) == pytest.approx(0.5, abs=0.01)
    assert statistics.fmean(hidden > visible for visible, hidden in pairs) == pytest.approx(0.03, abs=0.005)


def test_a_delay_of_one_is_the_first_hacked_evaluation_and_early_halts_are_left_out() -> None:
    delays = loaded("evidence_delays")
    assert delays.median_delay([delays.ONSET]) == 1.0
    assert delays.median_delay([delays.ONSET + 4, delays.ONSET - 1, delays.ONSET + 6]) == 6.0
    assert delays.median_delay([None, None, delays.ONSET]) is None
    assert delays.median_delay([3]) is None
    alarm, warned = delays.first_alarm(delays.jump(0.9, 32), 0.1, random.Random(0))
    assert delays.ONSET <= warned <= alarm <= delays.ONSET + 5


def test_each_row_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    delays = loaded("evidence_delays")
    monkeypatch.setattr(delays, "PLANNED", 60)
    monkeypatch.setattr(delays, "ONSET", 20)
    monkeypatch.setattr(sys, "argv", ["evidence_delays.py", "--runs", "3", "--clean-runs", "2"])
    delays.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["median_delay"] < 40 for row in rows[:4]] == [True] * 4
    halted = {row["run"]: row["halted"] for row in rows if "halted" in row}
    assert len(halted) == 5
    assert halted["clean, gap .03"] == 0.0
    assert halted["broken: grader outages, gap .03"] == 1.0


def test_the_cost_of_an_update_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evidence_update_seconds.py", "--updates", "3", "--samples", "4"])
    loaded("evidence_update_seconds").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "EvidenceGuard, scores 0 and 1",
        "EvidenceGuard, all scores different",
        "HeldOutGuard",
    ]
    assert all("median" in line and "us" in line for line in lines)
