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
ROWS = 4
SETTINGS = {
    **dict.fromkeys(("trl.per_device_train_batch_size", "trl.num_generations"), ROWS),
    **dict.fromkeys(("heldout.every", "heldout.before_and_after_samples", "trainer.checkpoint_every"), 1),
}


def launched(out: Path, *extra: str) -> dict[str, Any]:
    """Both processes' run; what they printed together is one JSON object."""
    flags = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--log-dir", str(out.parent)]  # else a folder stays behind in /tmp
    verb = ["-m", "composer_replication.cli.main", "train", str(RECIPE), "--out", str(out), "--json"]
    words = [*launcher, *verb, *flags, "--set", "trl.max_steps=2", *extra]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stderr.count("tasks: building and proving them") <= 1
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.long
def test_two_processes_share_one_run_and_go_on_with_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = launched(out)
    assert (summary["steps"], summary["stop_reason"]) == (2, "finished")
    assert [row["step"] for row in read_jsonl(out / "metrics.jsonl")] == [1, 2]
    assert len(read_jsonl(out / "verdicts.jsonl")) == 2
    for step in (1, 2):  # each process keeps the answers that it graded
        for part in ("", "-process-1"):
            assert len(read_jsonl(out / "rollouts" / f"step-{step:06d}{part}.jsonl")) == ROWS
    assert summary["before"]["heldout"]["by_task"].keys() == summary["after"]["heldout"]["by_task"].keys()
    for name in ("summary.json", "after.json"):  # as after a kill between the last checkpoint and the summary
        (out / name).unlink()
    assert launched(out, "--resume")["parameter_sha256"] == summary["parameter_sha256"]
    assert (out / "model" / "config.json").is_file()
