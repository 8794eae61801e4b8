"""``guard scan`` over runs of a real model, recorded on disk: the verdict is the one that the run ended with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_replication.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests" / "golden" / "recorded_runs"
RUNS = sorted(path.parent.name for path in RECORDED.glob("*/metrics.jsonl"))


@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_of_the_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [json.loads(line) for line in (RECORDED / name / "verdicts.jsonl").read_text().splitlines()]
    recipe = ROOT / "recipes" / name.rpartition("-")[0] / "run.toml"
    exit_code = main(["guard", "scan", str(RECORDED / name), "--recipe", str(recipe), "--json"])
    result = json.loads(capsys.readouterr().out)
    fired = verdicts[-1]["fire"]
    assert exit_code == (5 if fired else 0)
    assert (result["fired"], result["reason"]) == (fired, verdicts[-1]["reason"])
    assert result["updates"] == len(verdicts)
    # The line of step N + 1 holds the verdict on the weights after N steps.
    assert result["fired_at"] == (verdicts[-1]["round_idx"] + 1 if fired else None)
    assert result["columns"]["kl"] == "killswitch/kl_to_init"


def test_the_honest_twin_is_among_them() -> None:
    assert len(RUNS) >= 4
    assert "quickstart-0" in RUNS
