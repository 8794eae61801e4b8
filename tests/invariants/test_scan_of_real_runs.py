"""``guard scan`` over logs that real trainers wrote says what the guard said in the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tiny_trainer import PROMPTS, build_trainer
from trl import GRPOTrainer

from composer_replication.cli.main import main
from composer_replication.report.guard_scan import choose_columns, readings_of, replay
from composer_replication.report.run_logs import read_log
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.safety import HeldOutGuard
from composer_replication.trainer.guard_callback import HeldOutGuardCallback

SETTINGS: dict[str, Any] = {"min_steps": 2, "ema_alpha": 0.5, "kl_hard_stop": 99.0, "max_proxy_real_gap": 0.9}
COMPARED = ("fire", "in_loop_ema", "heldout_ema", "kl_ema", "proxy_real_gap", "decline_streak", "num_updates")


def scanned(path: Path) -> list[Any]:
    log = read_log(path)
    return replay(HeldOutGuard(**SETTINGS), readings_of(log, choose_columns(log))[0])


def truth() -> Any:
    scores = iter([0.5, 0.4, 0.6, 0.3, 0.2, 0.1])
    return lambda: next(scores)


def assert_same(found: list[Any], verdicts: Path, num_updates: int) -> None:
    rows = read_jsonl(verdicts)
    assert len(rows) == num_updates
    assert [[getattr(status, name) for name in COMPARED] for status in found] == [
        [row[name] for name in COMPARED] for row in rows
    ]
    assert len({status.in_loop_ema for status in found}) > 2  # the numbers do differ


@pytest.mark.parametrize("has_kl", [False, True])
def test_our_own_run(tmp_path: Path, *, has_kl: bool) -> None:
    run = RunFolder(tmp_path)
    trainer = build_trainer(
        output_dir=run.checkpoints,
        run_folder=run,
        heldout_guard=HeldOutGuard(**SETTINGS),
        heldout_eval_fn=truth(),
        max_steps=4,
        lora_adapter=has_kl,
        learning_rate=1e-2,
    )
    trainer.train()
    found = scanned(tmp_path)  # the folder stands for its metrics.jsonl
    assert_same(found, run.verdicts, 4)
    assert (found[-1].kl_ema is not None) is has_kl


def test_a_trl_run_under_the_callback(tmp_path: Path) -> None:
    trainer = build_trainer(
        output_dir=tmp_path,
        trainer_class=GRPOTrainer,
        callbacks=[HeldOutGuardCallback(HeldOutGuard(**SETTINGS), truth())],
        max_steps=4,
        beta=0.1,
        lora_adapter=True,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    assert_same(scanned(tmp_path), tmp_path / "verdicts.jsonl", 4)  # of checkpoint-4, the newest


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
