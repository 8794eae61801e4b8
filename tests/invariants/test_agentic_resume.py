"""A guarded run of several turns that is killed among its rollouts, with a curriculum, hints and effort, ends like one that is not."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
from agentic_runs import SETTINGS, what_was_played, without_times
from finished import finished

from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.tasks.build import build_tasks
from composer_replication.trainer.checkpoints import newest_whole_checkpoint

pytestmark = pytest.mark.timeout(900)

WORKER = Path(__file__).with_name("agentic_worker.py")
PROJECT = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"
PINS = tuple(f"tinymath/numbers.py::{name}" for name in ("absolute", "clamp", "sign"))  # clamp is held out


@pytest.mark.long
def test_killed_among_its_rollouts_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    store = tmp_path / "tasks"
    build_tasks([str(PROJECT)], store, symbols={str(PROJECT): PINS})
    settings = {"tasks": {"store": str(store)}, **SETTINGS}
    worker = runpy.run_path(str(WORKER))
    run_or_resume = worker["run_or_resume"]
    whole = run_or_resume(tmp_path / "whole", settings)
    spec = tmp_path / "spec.json"
    # The last step ends with a held-out episode of at most three batches; before it eight others went in batches of three.
    kill_at = worker["Deadly"].num_batches - 5
    spec.write_text(json.dumps({"run": str(tmp_path / "killed"), "settings": settings, "kill_at": kill_at}))
    done = finished(
        [sys.executable, str(WORKER), str(spec)], timeout=600, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    killed, unbroken = RunFolder(tmp_path / "killed"), RunFolder(tmp_path / "whole")
    checkpoint = newest_whole_checkpoint(killed.checkpoints)
    assert checkpoint is not None and checkpoint.name == "checkpoint-2"
    resumed = run_or_resume(tmp_path / "killed", settings)
    assert resumed["parameter_sha256"] == whole["parameter_sha256"]
    assert what_was_played(killed) == what_was_played(unbroken)
    assert without_times(read_jsonl(killed.metrics)) == without_times(read_jsonl(unbroken.metrics))
    assert read_jsonl(killed.verdicts) == read_jsonl(unbroken.verdicts)
    states = [
        json.loads((folder.checkpoints / "checkpoint-3" / "composer_state.json").read_text())
        for folder in (killed, unbroken)
    ]
    for part in ("prompt_source", "guard", "last_verdict"):
        assert states[0][part] == states[1][part] is not None
    assert states[0]["last_verdict"]["num_updates"] == len(read_jsonl(killed.verdicts)) == 3
    played = what_was_played(unbroken)
    assert len(played) == 6 and len({episode[2] for step in played for episode in step}) > 1
    assert len({episode[0] for step in played for episode in step}) == len(PINS)
