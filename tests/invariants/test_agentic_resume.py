"""A run of several turns that is killed among its rollouts, with a curriculum, hints and effort, ends like one that is not."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_replication.rollouts.episodes.trajectories import read_trajectories
from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.tasks.build import build_tasks
from composer_replication.trainer.checkpoints import newest_whole_checkpoint

pytestmark = pytest.mark.timeout(900)

WORKER = Path(__file__).with_name("agentic_worker.py")
PROJECT = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"
PINS = ("tinymath/numbers.py::clamp", "tinymath/numbers.py::sign", "tinymath/text.py::initials")
SETTINGS = {
    "trl.max_steps": 3,
    "trl.save_total_limit": 9,
    "trl.learning_rate": 1e-2,
    "agent.max_new_tokens": 2048,
    "agent.max_batch": 3,
    "agent.max_concurrent": 6,
    "curriculum.half_life": 3.0,
    "trainer.alpha_sdpo": 0.5,
}
_CLOCK = ("step_time", "step_seconds", "seconds", "grading_seconds")


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            name: round(value, 6) if name == "loss" else value  # a running sum rounds by where it began
            for name, value in row.items()
            if name not in _CLOCK
        }
        for row in rows
    ]


def what_was_played(folder: RunFolder) -> list[list[Any]]:
    return [
        [
            (
                episode.task_id,
                episode.seed,
                episode.reward,
                episode.stop_reason,
                *(turn.observed.turn.completion for turn in episode.turns),
            )
            for episode in read_trajectories(path)
        ]
        for path in sorted(folder.rollouts.glob("episodes-*.jsonl"))
    ]


@pytest.mark.long
def test_killed_among_its_rollouts_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    store = tmp_path / "tasks"
    build_tasks([str(PROJECT)], store, symbols={str(PROJECT): PINS})
    settings = {"tasks": {"store": str(store)}, **SETTINGS}
    run_or_resume = runpy.run_path(str(WORKER))["run_or_resume"]
    whole = run_or_resume(tmp_path / "whole", settings)
    spec = tmp_path / "spec.json"
    # A step has eight episodes of two or three turns, six at a time in batches of three: this is amid the third step.
    spec.write_text(json.dumps({"run": str(tmp_path / "killed"), "settings": settings, "kill_at": 18}))
    done = subprocess.run(
        [sys.executable, str(WORKER), str(spec)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    killed, unbroken = RunFolder(tmp_path / "killed"), RunFolder(tmp_path / "whole")
    checkpoint = newest_whole_checkpoint(killed.checkpoints)
    assert checkpoint is not None and checkpoint.name in ("checkpoint-1", "checkpoint-2")
    resumed = run_or_resume(tmp_path / "killed", settings)
    assert resumed["parameter_sha256"] == whole["parameter_sha256"]
    assert what_was_played(killed) == what_was_played(unbroken)
    assert without_times(read_jsonl(killed.metrics)) == without_times(read_jsonl(unbroken.metrics))
    states = [
        json.loads((folder.checkpoints / "checkpoint-3" / "composer_state.json").read_text())["prompt_source"]
        for folder in (killed, unbroken)
    ]
    assert states[0] == states[1] is not None
    played = what_was_played(unbroken)
    assert len(played) == 3 and len({episode[2] for step in played for episode in step}) > 1
    assert len({episode[0] for step in played for episode in step}) == len(PINS)
