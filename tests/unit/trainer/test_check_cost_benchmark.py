"""The benchmark of the checks runs and prints what it claims; no time is asserted."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "check_cost.py"


def test_it_prints_both_clocks_and_their_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["check_cost.py", "--steps", "1", "--tokens", "2"])
    try:
        runpy.run_path(str(BENCHMARK))["main"]()
    finally:
        torch.set_num_threads(num_threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["steps", "checks", "share"]
    assert "claim: under 1%" in lines[2]
