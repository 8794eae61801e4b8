"""The guard's callback in runs that are killed, under transformers' own Trainer."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from finished import finished

from composer_replication.run_folder import read_jsonl
from composer_replication.trainer.guard_callback import STATE_KEY

WORKER = Path(__file__).with_name("callback_worker.py")
run_or_resume = runpy.run_path(str(WORKER))["run_or_resume"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def uninterrupted(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that nothing cut short, to be read only, and what came of it."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "whole"
    return folder, run_or_resume(folder)


@pytest.mark.long
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, uninterrupted: tuple[Path, dict[str, Any]]
) -> None:
    """Folds at 1, 3, 5, 7; saved at 3; killed inside step 6, after the fold at 5, which is made again."""
    folder, whole = uninterrupted
    assert whole["folds"] == [1, 3, 5, 7]
    assert whole["calls"] == 4
    done = finished(
        [sys.executable, str(WORKER), str(tmp_path / "killed")],
        timeout=500,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    verdicts = tmp_path / "killed" / "verdicts.jsonl"
    assert [row["round_idx"] for row in read_jsonl(verdicts)] == [1, 3, 5]
    assert run_or_resume(tmp_path / "killed", resume=True) == whole
    assert read_jsonl(verdicts) == read_jsonl(folder / "verdicts.jsonl")


@pytest.mark.parametrize(
    "lost", ["", "guard", *(pytest.param(n, marks=pytest.mark.long) for n in ("evaluator", "last_round_idx"))]
)
def test_each_part_of_the_stored_state_is_needed(
    tmp_path: Path, uninterrupted: tuple[Path, dict[str, Any]], lost: str
) -> None:
    folder, whole = uninterrupted
    checkpoint = tmp_path / "resumed" / "checkpoint-3"
    shutil.copytree(folder / "checkpoint-3", checkpoint)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    saved = state["stateful_callbacks"][STATE_KEY]
    if lost == "guard":
        saved["guard"]["memory"]["in_loop_ema"] += 0.5
    elif lost:
        saved[lost] = None
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    assert (run_or_resume(tmp_path / "resumed", resume=True) == whole) is (lost == "")
