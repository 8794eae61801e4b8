"""The guard's callback in runs that are killed, and on two processes, under transformers' own Trainer."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from two_processes import both_ranks

from composer_replication.run_folder import read_jsonl
from composer_replication.trainer.guard_callback import STATE_KEY

WORKER = Path(__file__).with_name("callback_worker.py")
run_or_resume = runpy.run_path(str(WORKER))["run_or_resume"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over threads depend on their number; the worker has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that nothing cut short, to be read only, and what came of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("uninterrupted") / "whole"
    told = run_or_resume(folder)
    torch.set_num_threads(before)
    return folder, told


@pytest.mark.long
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, uninterrupted: tuple[Path, dict[str, Any]]
) -> None:
    """Folds at 1, 3, 5, 7; saved at 3; killed inside step 6, after the fold at 5, which is made again."""
    folder, whole = uninterrupted
    assert whole["folds"] == [1, 3, 5, 7]
    assert whole["calls"] == 4
    done = subprocess.run(
        [sys.executable, str(WORKER), "kill", str(tmp_path / "killed")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
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


@pytest.mark.long
@pytest.mark.promise
def test_two_processes_evaluate_once_and_stop_together(tmp_path: Path) -> None:
    ranks = both_ranks(WORKER, tmp_path, "pair")
    first, second = (rank["halting"] for rank in ranks)
    assert (first["outcome"], first["step"]) == ("CR0601", 3)
    assert (first["calls"], second["calls"]) == (3, 0)
    assert {**first, "calls": 0} == {**second, "calls": 0}  # verdict, step, guard and weights
    assert (tmp_path / "halting" / "checkpoint-3" / "trainer_state.json").is_file()
    assert [row["fire"] for row in read_jsonl(tmp_path / "halting" / "verdicts.jsonl")] == [
        False,
        False,
        True,
    ]
    assert [rank["failing"]["outcome"] for rank in ranks] == ["CR0999", "CR0999"]
    assert [rank["failing"]["calls"] for rank in ranks] == [1, 0]
