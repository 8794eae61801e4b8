"""Lines of metrics.jsonl, rows of verdicts.jsonl, and cutting them back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.trainer.metrics_log import RunLog, StepWindow, cut_back, json_row


def test_a_number_that_is_none_is_told_once() -> None:
    window, metrics = StepWindow(), {"x": [math.nan]}
    assert [window.take(metrics) for _ in range(3)] == [{"x": None}, {}, {}]


def test_the_window_takes_each_entry_once() -> None:
    window = StepWindow()
    metrics = {"reward": [0.2, 0.4], "entropy": [1.0]}
    assert window.take(metrics) == {"reward": 0.30000000000000004, "entropy": 1.0}
    assert window.take(metrics) == {}
    metrics["reward"].append(0.9)
    assert window.take(metrics) == {"reward": 0.9}


def test_the_window_survives_the_clearing_of_the_lists() -> None:
    window = StepWindow()
    metrics = {"reward": [0.2, 0.4]}
    window.take(metrics)
    metrics.clear()
    window.after_clearing(metrics)
    metrics["reward"] = [0.6]
    assert window.take(metrics) == {"reward": 0.6}


def test_the_window_keeps_what_is_cleared_inside_a_step() -> None:
    window = StepWindow()
    metrics = {"reward": [0.2]}
    window.before_clearing(metrics)
    metrics.clear()
    window.after_clearing(metrics)
    metrics["entropy"] = [1.5]
    assert window.take(metrics) == {"reward": 0.2, "entropy": 1.5}
    assert window.take(metrics) == {}


def test_the_window_leaves_out_what_is_not_finite() -> None:
    window = StepWindow()
    assert window.take({"reward": [math.nan, 0.5], "kl": [math.inf]}) == {"reward": 0.5, "kl": None}


def test_the_window_sees_a_count_that_is_overwritten_in_place() -> None:
    window = StepWindow()
    assert window.take({"num_tokens": [80]}) == {"num_tokens": 80}
    assert window.take({"num_tokens": [80]}) == {}
    assert window.take({"num_tokens": [160]}) == {"num_tokens": 160}


def test_a_line_waits_for_trls_row_and_is_written_once(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path))
    log.noted |= {"killswitch/round_idx": 0, "heldout/score": 0.5}
    log.finish_step(1, {"reward": 0.25, "loss": 0.1})
    log.add_trl_row(1, {"grad_norm": 2.0, "reward": 99.0, "eval_loss": 3.0, "train_runtime": 5.0})
    assert not log.folder.metrics.exists()
    log.flush()
    log.flush()
    assert read_jsonl(log.folder.metrics) == [
        {
            "step": 1,
            "reward": 0.25,
            "loss": 0.1,
            "killswitch/round_idx": 0,
            "heldout/score": 0.5,
            "grad_norm": 2.0,
            "eval_loss": 3.0,
        }
    ]


def test_a_row_of_another_step_is_not_taken(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path))
    log.finish_step(1, {})
    log.add_trl_row(2, {"grad_norm": 2.0})
    log.flush()
    assert read_jsonl(log.folder.metrics) == [{"step": 1}]


def test_the_next_step_writes_the_one_before(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path))
    log.finish_step(1, {})
    log.finish_step(2, {})
    assert [row["step"] for row in read_jsonl(log.folder.metrics)] == [1]


def test_numbers_that_are_not_finite_become_null() -> None:
    row = json_row(
        {"a": math.nan, "b": -math.inf, "c": torch.tensor(1.5), "d": True, "e": None, "f": "x", "g": [1]}
    )
    assert row == {"a": None, "b": None, "c": 1.5, "d": True, "e": None, "f": "x", "g": "[1]"}
    assert "NaN" not in json.dumps(row)


def test_cutting_back_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path))
    log.folder.rollouts.mkdir(parents=True)
    for step in range(1, 6):
        log.finish_step(step, {})
        log.flush()
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


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("metrics.jsonl", '{"step": 1}\n{}\n', "a line has no integer step"),
        ("metrics.jsonl", '{"step": 1}\n3\n', "a line has no integer step"),
        ("metrics.jsonl", '{"step": 2}\n', "not those of steps 1 to 2"),
        ("metrics.jsonl", '{"step": 1}\n{"step": 1}\n{"step": 2}\n', "not those of steps 1 to 2"),
        ("verdicts.jsonl", '{"round_idx": "0"}\n', "a line has no integer round_idx"),
    ],
)
def test_a_log_that_was_changed_is_not_gone_on_with(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        cut_back(RunFolder(tmp_path), 2, 1)
    assert (caught.value.code, caught.value.where) == ("CR0401", str(tmp_path / name))
    assert (tmp_path / name).read_text() == text


def test_cutting_back_to_the_start_keeps_nothing(tmp_path: Path) -> None:
    log = RunLog(RunFolder(tmp_path))
    log.finish_step(1, {})
    log.flush()
    log.verdict({"round_idx": 0})
    cut_back(RunFolder(tmp_path), 0, None)
    assert (read_jsonl(log.folder.metrics), read_jsonl(log.folder.verdicts)) == ([], [])
