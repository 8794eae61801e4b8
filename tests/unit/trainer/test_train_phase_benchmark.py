"""The benchmark of the train phase runs, compares gradients, and prints what it claims; no time is asserted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import train_phase

from composer_replication.trainer import prefix_wiring

SMALL = argparse.Namespace(hidden=32, layers=1, repetitions=1, checkpointing=False, whole_step=False)


def test_a_line_has_times_and_ratios() -> None:
    words = train_phase.compare(9, 4, SMALL).split()
    assert words[:2] == ["9", "4"]
    assert words[5].endswith("%")
    assert words[6].endswith("x")
    assert len(words) == 8  # no reason against sharing


def test_under_checkpointing_prompts_are_shared_too() -> None:
    line = train_phase.compare(9, 4, argparse.Namespace(**{**vars(SMALL), "checkpointing": True}))
    assert len(line.split()) == 8


def test_what_stands_against_sharing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_wiring, "unsupported_reason", lambda *_, **__: "it cannot be.")
    assert train_phase.compare(9, 4, SMALL).endswith("log-probabilities: it cannot be.")


@pytest.mark.parametrize(("speed_up", "word"), [(2.51, "met"), (2.5, "met"), (2.49, "missed")])
def test_a_goal_is_met_or_missed(speed_up: float, word: str) -> None:
    assert train_phase.verdict(2.5, speed_up) == f"2.5x {word}"
    assert train_phase.verdict(None, speed_up) == "-"


def test_a_whole_step_samples_as_many_tokens_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []
    step_once = train_phase.step_once

    def step(trainer: Any) -> float:
        seconds: float = step_once(trainer)
        batch = trainer._buffered_inputs[0]
        lengths.append((batch["prompt_ids"].size(1), batch["completion_ids"].size(1)))
        return seconds

    monkeypatch.setattr(train_phase, "step_once", step)
    line = train_phase.compare(9, 4, argparse.Namespace(**{**vars(SMALL), "whole_step": True}))
    assert len(line.split()) == 8
    assert lengths == [(9, 4)] * 3


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
