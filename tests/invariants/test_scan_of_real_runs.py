"""``guard scan`` over logs that real trainers wrote says what the guard said in the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from tiny_trainer import PROMPTS, build_trainer
from trl import GRPOTrainer

from composer_replication.cli.main import main
from composer_replication.report.guard_scan import choose_columns, readings_of
from composer_replication.report.run_logs import read_log

if TYPE_CHECKING:
    import pytest


def truth() -> Any:
    scores = iter([0.5, 0.4, 0.6, 0.3, 0.2, 0.1])
    return lambda: next(scores)


def test_a_trl_run_without_a_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The truth stands in rows of its own: eval_reward, every third step and at the end."""
    trainer = build_trainer(
        output_dir=tmp_path,
        trainer_class=GRPOTrainer,
        eval_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
        eval_strategy="steps",
        eval_steps=3,
        max_steps=7,
        logging_steps=2,
        per_device_eval_batch_size=4,
        save_strategy="steps",
        save_steps=7,
    )
    trainer.train()
    history = trainer.state.log_history
    rewards = {row["step"]: row["reward"] for row in history if "reward" in row}
    truths = {row["step"]: row["eval_reward"] for row in history if "eval_reward" in row}
    assert (sorted(rewards), sorted(truths)) == ([2, 4, 6], [3, 6, 7])
    log = read_log(tmp_path)
    found = readings_of(log, choose_columns(log))[0]
    assert [(step, proxy, truth) for step, proxy, truth, _ in found] == [
        (3, rewards[2], truths[3]),
        (6, rewards[6], truths[6]),
        (7, rewards[6], truths[7]),
    ]
    assert main(["guard", "scan", str(tmp_path)]) == 6
    told = capsys.readouterr().out
    assert "proxy reward (guessed); truth eval_reward (guessed)" in told
    assert "1 value(s) of the truth had no new proxy and were paired with an older one." in told
