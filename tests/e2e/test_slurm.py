"""Launches on a real Slurm of two nodes: trained over both, halted for good, requeued exactly, stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.run_folder import read_jsonl

from .slurm_cluster import slurm, why_not

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "run.toml"
WAIT_SECONDS = 900
SETTINGS = {
    "trl.per_device_train_batch_size": 4,
    "trl.num_generations": 4,
    "trl.max_completion_length": 8,
    "heldout.before_and_after_samples": 0,
    "heldout.every": 100,
    "trainer.checkpoint_every": 1000,
    "trainer.save_model": "false",
}
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


class Launcher:
    """``composer-rl`` in a folder of its own, with the variables by which Slurm is found."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self.variables = folder, variables

    def __call__(self, *words: object, code: int = 0) -> dict[str, Any]:
        command = [
            sys.executable,
            "-m",
            "composer_replication.cli.main",
            "launch",
            *map(str, words),
            "--json",
        ]
        environment = {**os.environ, **self.variables, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def launch(self, name: str, *words: object, **settings: object) -> str:
        flags = [
            part for key, value in {**SETTINGS, **settings}.items() for part in ("--set", f"{key}={value}")
        ]
        options = ["--option", "memory_gib=4", "--option", "cpus=1", "--option", "time=00:50:00"]
        return str(self(RECIPE, "--to", "slurm", "--name", name, *options, *flags, *words)["id"])

    def status(self, name: str, code: int = 0) -> dict[str, Any]:
        return self("status", name, code=code)

    def slurm(self, *words: str) -> str:
        return subprocess.run(
            words,
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    def ended(self, name: str, code: int) -> dict[str, Any]:
        """Wait for the end; ``status`` must have this exit code then."""
        answers: dict[str, Any] = {}

        def is_over() -> bool:
            done = subprocess.run(
                [sys.executable, "-m", "composer_replication.cli.main", "launch", "status", name, "--json"],
                cwd=self.folder, env=_with(self.variables), capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            answers.update(json.loads(done.stdout))
            answers["code"] = done.returncode
            return answers["state"] not in ("waiting", "running")

        wait_for(is_over)
        assert answers["code"] == code, (answers, self("logs", name)["logs"][-3000:])
        return answers


def _with(variables: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **variables}


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(4)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def launcher(cluster: dict[str, str], tmp_path: Path) -> Launcher:
    return Launcher(tmp_path, cluster)


def test_two_nodes_train_one_run_and_a_requeued_one_ends_with_the_same_weights(launcher: Launcher) -> None:
    steps = 12
    launcher.launch("whole", "--nodes", 2, **{"trl.max_steps": steps})
    assert launcher.ended("whole", 0)["state"] == "succeeded"
    whole = launcher.folder / "runs" / "whole"
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["global_step"] == steps
    for part in ("", "-process-1"):  # each node graded its own answers
        assert len(read_jsonl(whole / "rollouts" / f"step-000001{part}.jsonl")) == 4
    job = launcher.launch("cut", "--nodes", 2, **{"trl.max_steps": steps})
    cut = launcher.folder / "runs" / "cut"
    wait_for(lambda: len(read_jsonl(cut / "metrics.jsonl")) >= 3)
    launcher.slurm("scontrol", "requeue", job)
    wait_for(lambda: launcher.status("cut")["state"] == "waiting")
    saved = list((cut / "checkpoints").glob("checkpoint-*/MANIFEST.json"))
    assert len(saved) == 1  # none was due: the order to end made it
    assert 0 < int(saved[0].parent.name.removeprefix("checkpoint-")) < steps
    launcher.slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert launcher.ended("cut", 0)["state"] == "succeeded"
    assert "Restarts=1" in launcher.slurm("scontrol", "show", "job", job)
    again = json.loads((cut / "summary.json").read_text())
    assert again["parameter_sha256"] == summary["parameter_sha256"]
    assert [row["step"] for row in read_jsonl(cut / "metrics.jsonl")] == list(range(1, steps + 1))


def test_a_halted_run_has_exit_code_5_and_is_not_requeued(launcher: Launcher) -> None:
    halts = {"guard.min_steps": 1, "guard.max_proxy_real_gap": 1e-6, "heldout.every": 1}
    job = launcher.launch("halted", **{"trl.max_steps": 40, **halts})
    answer = launcher.ended("halted", 5)
    assert (answer["state"], answer["exit_code"]) == ("halted", 5)
    assert "guard      halted" in launcher("logs", "halted")["logs"]
    shown = launcher.slurm("scontrol", "show", "job", job)
    assert "JobState=FAILED" in shown
    assert "Restarts=0" in shown
    assert "Requeue=1" in shown  # only for what the run did not decide


def test_a_stopped_job_has_saved(launcher: Launcher) -> None:
    launcher.launch("stopped", **{"trl.max_steps": 100000})
    run = launcher.folder / "runs" / "stopped"
    wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) >= 1)
    assert launcher.status("stopped")["state"] == "running"
    assert launcher("stop", "stopped")["stopped"]
    assert launcher.ended("stopped", 0)["state"] == "stopped"
    wait_for(lambda: any((run / "checkpoints").glob("checkpoint-*/MANIFEST.json")))


@pytest.mark.parametrize(("option", "said"), [("partition=nowhere", "partition"), ("gpu_type=h100", "gres")])
def test_what_slurm_refuses_is_one_sentence_and_nothing_is_submitted(
    launcher: Launcher, option: str, said: str
) -> None:
    gpus = ["--gpus", "1"] if option.startswith("gpu") else []
    answer = launcher(RECIPE, "--to", "slurm", "--name", "refused", *gpus, "--option", option, code=2)
    assert answer["error"]["code"] == "CR0932"
    assert said in answer["error"]["message"].lower()
    assert not (launcher.folder / "jobs" / "refused" / "job.json").exists()
    assert launcher.slurm("squeue", "--noheader", "--name=refused") == ""
