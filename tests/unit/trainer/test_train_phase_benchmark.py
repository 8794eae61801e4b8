"""The benchmark of the train phase runs, compares gradients, and prints what it claims; no time is asserted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import train_phase

SMALL = argparse.Namespace(hidden=32, layers=1, repetitions=1, checkpointing=False)


def test_a_line_has_times_and_ratios() -> None:
    words = train_phase.compare(9, 4, SMALL).split()
    assert words[:2] == ["9", "4"]
    assert words[5].endswith("%")
    assert words[6].endswith("x")


def test_under_checkpointing_it_says_that_nothing_was_shared() -> None:
    line = train_phase.compare(9, 4, argparse.Namespace(**{**vars(SMALL), "checkpointing": True}))
    assert "gradient checkpointing is on" in line


def test_other_gradients_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    build = train_phase.build

    def build_other(kind: str, *rest: object) -> object:
        trainer = build(kind, *rest)
        if kind == train_phase.SHARED:
            trainer.model.lm_head.weight.data.mul_(1.01)
        return trainer

    monkeypatch.setattr(train_phase, "build", build_other)
    with pytest.raises(SystemExit, match="ours, shared has other gradients"):
        train_phase.compare(9, 4, SMALL)
