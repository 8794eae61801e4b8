"""Lines of metrics.jsonl, rows of verdicts.jsonl, and cutting them back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.trainer.metrics_log import StepLines, cut_back, json_row


def lines_in(folder: Path) -> Any:
    lines = StepLines(None)
    lines.folder = RunFolder(folder)
    return lines


def test_what_was_noted_is_in_the_line_of_its_step_alone(tmp_path: Path) -> None:
    log = lines_in(tmp_path)
    log.noted |= {"killswitch/round_idx": 0, "heldout/score": 0.5}
    log.finish_step(1, {"reward": 0.25, "loss": 0.1})
    log.finish_step(2, {"reward": 0.5, "loss": 0.2})
    assert read_jsonl(log.folder.metrics) == [
        {"step": 1, "reward": 0.25, "loss": 0.1, "killswitch/round_idx": 0, "heldout/score": 0.5},
        {"step": 2, "reward": 0.5, "loss": 0.2},
    ]


def test_numbers_that_are_not_finite_become_null() -> None:
    row = json_row(
        {"a": math.nan, "b": -math.inf, "c": torch.tensor(1.5), "d": True, "e": None, "f": "x", "g": [1]}
    )
    assert row == {"a": None, "b": None, "c": 1.5, "d": True, "e": None, "f": "x", "g": "[1]"}
    assert "NaN" not in json.dumps(row)


def test_cutting_back_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    log = lines_in(tmp_path)
    log.folder.rollouts.mkdir(parents=True)
    for step in range(1, 6):
        log.finish_step(step, {})
        log.verdict({"round_idx": step - 1})
        (log.folder.rollouts / f"step-{step:06d}.jsonl").write_text("{}\n")
    (log.folder.rollouts / "notes.txt").write_text("mine")
    with log.folder.metrics.open("a") as handle:
        handle.write('{"step": 6, "rew')  # a torn last line
    cut_back(RunFolder(tmp_path), 3, 2)
    assert [row["step"] for row in read_jsonl(log.folder.metrics)] == [1, 2, 3]
    assert [row["round_idx"] for row in read_jsonl(log.folder.verdicts)] == [0, 1, 2]
    assert sorted(path.name for path in log.folder.rollouts.iterdir()) == [
        "notes.txt",
        "step-000001.jsonl",
        "step-000002.jsonl",
        "step-000003.jsonl",
    ]
    assert log.folder.metrics.read_text().count("\n") == 3


@pytest.mark.parametrize("line", ['{"stepp": 1}', '{"step": "1"}', "5"])
def test_a_log_with_rows_that_are_not_ours_is_refused_and_left_alone(tmp_path: Path, line: str) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(f'{line}\n{{"step": 2}}\n')
    with pytest.raises(InputError, match=r"CR0401.*no whole number as step"):
        cut_back(folder, 1, None)
    assert folder.metrics.read_text().startswith(line)
