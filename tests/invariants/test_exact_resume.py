"""A run that was killed with SIGKILL and resumed ends with the weights of one that was not."""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentic_runs import without_times
from finished import finished

from composer_replication.run_folder import RunFolder, read_jsonl
from composer_replication.trainer.checkpoints import newest_whole_checkpoint, write_manifest

WORKER = Path(__file__).with_name("resume_worker.py")
run_or_resume = runpy.run_path(str(WORKER))["run_or_resume"]
# Six steps over a second epoch of the shuffled data (two batches of two prompts an epoch).
PLAIN = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
# Saved in the middle of a generation that serves eight micro-steps, logged every second step, with adapters.
REUSED = {
    "max_steps": 6,
    "save_steps": 3,
    "num_iterations": 2,
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 2,
    "logging_steps": 2,
    "lora_adapter": True,
    "learning_rate": 1e-2,
}
SHARED = {**PLAIN, "prefix_sharing": True}
# Teacher, draws, reference and hinted rows of a buffered generation, all in the middle of what they do.
CHANNELS = {**REUSED, "lora_adapter": False, "loss_channels": True}
# Tasks drawn by what the policy did with earlier ones, replacements included.
CHOSEN = {**PLAIN, "curriculum": True}
# Who gets which reward is drawn, and drawn again for the step that was cut off.
SHUFFLED = {**CHOSEN, "is_shuffled": True}


pytestmark = pytest.mark.usefixtures("one_thread")


def run_and_kill(folder: Path, settings: dict[str, Any], *, kill_at: int) -> None:
    spec = folder.with_suffix(".json")
    spec.write_text(json.dumps({"run": str(folder), "settings": settings, "kill_at": kill_at}))
    done = finished(
        [sys.executable, str(WORKER), str(spec)],
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


@pytest.fixture(scope="module")
def uninterrupted(
    one_thread: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[RunFolder, dict[str, Any]]]:
    """The run of some settings that nothing cut short, and what came of it; to be read only."""

    @functools.cache
    def run(spec: str) -> tuple[RunFolder, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("whole") / "run"
        return RunFolder(folder), run_or_resume(folder, json.loads(spec))

    return lambda settings: run(json.dumps(settings))


@pytest.mark.parametrize(
    ("settings", "kill_at"),
    [
        pytest.param(PLAIN, 4, id="second-epoch"),
        pytest.param(REUSED, 5, id="inside-a-generation", marks=pytest.mark.long),
        pytest.param(SHARED, 6, id="prefix-sharing", marks=[pytest.mark.long, pytest.mark.promise]),
        pytest.param(
            CHANNELS, 5, id="loss-channels", marks=[pytest.mark.long, pytest.mark.promise]
        ),  # amid a generation, too
        pytest.param(CHOSEN, 4, id="curriculum", marks=pytest.mark.long),
        pytest.param(SHUFFLED, 4, id="shuffled-rewards", marks=pytest.mark.long),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(
    tmp_path: Path, uninterrupted, settings: dict[str, Any], kill_at: int
) -> None:
    unbroken, whole = uninterrupted(settings)
    run_and_kill(tmp_path / "killed", settings, kill_at=kill_at)
    killed = RunFolder(tmp_path / "killed")
    checkpoint = newest_whole_checkpoint(killed.checkpoints)
    assert checkpoint is not None
    assert 0 < int(checkpoint.name.removeprefix("checkpoint-")) < settings["max_steps"]
    # The kill came in the middle of a step, whose verdict had been written; and a save was begun.
    half_written = killed.checkpoints / "checkpoint-99"
    half_written.mkdir()
    (half_written / "model.safetensors").write_bytes(b"half")
    resumed = run_or_resume(tmp_path / "killed", settings)
    assert resumed == whole
    assert not half_written.exists()
    assert without_times(read_jsonl(killed.metrics)) == without_times(read_jsonl(unbroken.metrics))
    assert read_jsonl(killed.verdicts) == read_jsonl(unbroken.verdicts)
    steps = [row["step"] for row in read_jsonl(killed.metrics)]
    assert steps == list(range(1, settings["max_steps"] + 1))


@pytest.mark.parametrize(
    "lost",
    [
        "",
        "micro_step",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("num_permutations_done", "prompt_source")),
    ],
)
def test_what_a_checkpoint_holds_is_needed(
    tmp_path: Path, uninterrupted, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each part, taken out, changes the final weights: the equality above is not for free."""
    settings = {"micro_step": REUSED, "prompt_source": CHOSEN}.get(lost, PLAIN)
    unbroken, whole = uninterrupted(settings)
    folders = unbroken.checkpoints.glob("checkpoint-*")
    middle = sorted(folders, key=lambda folder: int(folder.name.removeprefix("checkpoint-")))[-2]
    checkpoint = tmp_path / "resumed" / "checkpoints" / middle.name
    shutil.copytree(middle, checkpoint)
    if lost:
        state = json.loads((checkpoint / "composer_state.json").read_text())
        state[lost], state["has_buffered_inputs"] = None if lost == "prompt_source" else 0, False
        (checkpoint / "composer_state.json").write_text(json.dumps(state))
    write_manifest(checkpoint)
    resumed = run_or_resume(tmp_path / "resumed", settings)
    assert (resumed["sha256"] == whole["sha256"]) is (lost == "")
    assert ("no state of the prompt source" in caplog.text) is (lost == "prompt_source")
