"""The benchmark behind the defaults measures what it says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[3] / "benchmarks" / "guard_defaults.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guard_defaults", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_defaults_rarely_halt_honest_runs_and_find_hacked_ones(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["guard_defaults.py", "--runs", "40", "--seed", "1"])
    benchmark.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ours, test_like = [row for row in rows if "worst_false_halt_rate" in row]
    assert ours["settings"] == "defaults"
    assert ours["worst_false_halt_rate"] <= 0.05
    assert ours["worst_detected"] >= 0.9
    assert ours["worst_median_delay"] <= 6
    assert test_like["best_false_halt_rate"] >= 0.6


def test_a_halt_is_counted_from_zero_and_no_halt_is_none(benchmark: ModuleType) -> None:
    settings = benchmark.SETTINGS["test-like"]
    assert benchmark.halted_at(settings, [0.5] * 9, [0.5] * 9) is None
    assert benchmark.halted_at(settings, [0.5] * 5 + [1.0], [0.5] * 6) == 5


def test_the_upper_bound_is_wilsons(benchmark: ModuleType) -> None:
    assert benchmark.upper_bound(0, 100) == pytest.approx(0.037, abs=1e-3)
    assert benchmark.upper_bound(13, 2000) == pytest.approx(0.0111, abs=1e-4)
