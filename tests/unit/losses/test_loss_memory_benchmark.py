"""The benchmark of memory runs every method, compares losses, and judges its goals; no time is asserted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from loss_memory import DISTILLED, FUSED, OURS, SAMPLED, Method, compare, judge_goals, make_setting

ARGUMENTS = argparse.Namespace(repetitions=0, most_gib=1.0)


def test_every_method_runs_and_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    case = make_setting(8, 4, 300, "cpu")
    compare("sampled", SAMPLED, case, ARGUMENTS)
    compare("distilled", DISTILLED, case, ARGUMENTS)
    lines = capsys.readouterr().out
    for method in (*SAMPLED, *DISTILLED):
        assert f"  {method.name} " in lines
    assert lines.count("goals: ") == 2


def test_another_loss_ends_it() -> None:
    wrong = Method("wrong", lambda case: 2 * SAMPLED[0].loss(case))
    with pytest.raises(SystemExit, match="disagree"):
        compare("sampled", (*SAMPLED, wrong), make_setting(8, 4, 300, "cpu"), ARGUMENTS)


def test_goals_are_met_at_their_bound_and_missed_beyond_it() -> None:
    peers = {FUSED: (400, 2.0), "TRL SDPO": (800, 1.0)}
    met = judge_goals({**peers, OURS: (100, 2.4)}, 800)
    assert [goal.rsplit(": ")[1] for goal in met] == ["met"] * 4
    missed = judge_goals({**peers, OURS: (401, 2.5)}, 800)
    assert [goal.rsplit(": ")[1] for goal in missed] == ["MISSED"] * 4
