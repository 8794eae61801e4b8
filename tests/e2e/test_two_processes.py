"""``train`` in two processes over gloo, as torchrun and accelerate launch start it: one run, one folder, one voice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_replication.run_folder import read_jsonl

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "run.toml"
STEPS = 2
ROWS = 4
SETTINGS = {
    "trl.max_steps": STEPS,
    "trl.per_device_train_batch_size": ROWS,
    "trl.num_generations": ROWS,
    "trainer.checkpoint_every": 1,
    "heldout.every": 1,
    "heldout.before_and_after_samples": 1,
}


def launched(out: Path, *extra: str) -> dict[str, Any]:
    """Both processes' run; what they printed together is one JSON object."""
    flags = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--log-dir", str(out.parent)]  # else a folder stays behind in /tmp
    verb = ["-m", "composer_replication.cli.main", "train", str(RECIPE), "--out", str(out), "--json"]
    done = subprocess.run(
        [*launcher, *verb, *flags, *extra], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stderr.count("tasks: building and proving them") <= 1
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.long
def test_two_processes_share_one_run_and_go_on_with_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = launched(out)
    assert (summary["steps"], summary["stop_reason"]) == (STEPS, "finished")
    rows = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    [state] = (out / "checkpoints").glob(f"*{STEPS}/trainer_state.json")
    means = {
        row["step"]: row["loss"] for row in json.loads(state.read_text())["log_history"] if "loss" in row
    }
    assert [row["loss"] for row in rows] == pytest.approx([means[1], means[2]], rel=1e-4)
    assert len(read_jsonl(out / "verdicts.jsonl")) == STEPS
    for step in range(1, STEPS + 1):  # each process keeps the answers that it graded
        for part in ("", "-process-1"):
            assert len(read_jsonl(out / "rollouts" / f"step-{step:06d}{part}.jsonl")) == ROWS
    assert (out / "model" / "config.json").is_file()
    assert summary["before"]["heldout"]["by_task"].keys() == summary["after"]["heldout"]["by_task"].keys()
    assert launched(out, "--resume")["parameter_sha256"] == summary["parameter_sha256"]
    # as after a kill between the last checkpoint and the summary
    (out / "summary.json").unlink()
    (out / "after.json").unlink()
    assert launched(out, "--resume")["parameter_sha256"] == summary["parameter_sha256"]
