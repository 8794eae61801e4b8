"""The benchmark of starts: a line with p50 and p99 for every backend that works on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks import sandbox_start
from composer_replication.sandbox import choose_backend


def test_the_nearest_rank() -> None:
    values = [float(number) for number in range(300, 0, -1)]
    assert [sandbox_start.percentile(values, percent) for percent in (50, 99, 100)] == [150.0, 297.0, 300.0]
    assert sandbox_start.percentile([7.0], 50) == sandbox_start.percentile([7.0], 99) == 7.0


def test_every_backend_that_works_here_has_both_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sandbox_start", "--runs", "2", "--parallel", "2"])
    sandbox_start.main()
    *lines, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    for name in ("bubblewrap", "bubblewrap-warm", "sandlock"):
        if choose_backend(name).is_available().ok:
            assert 0 < figures[name]["p50_ms"] <= figures[name]["p99_ms"]
            assert any(line.startswith(f"{name} ") for line in lines)
        else:
            assert any(line.startswith(f"{name}: not measured") for line in lines)


@pytest.mark.parametrize("number", ["0", "-1", "2.5", "x"])
def test_a_number_of_runs_is_a_number(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sandbox_start", "--runs", number])
    with pytest.raises(SystemExit) as ended:
        sandbox_start.main()
    assert ended.value.code == 2
