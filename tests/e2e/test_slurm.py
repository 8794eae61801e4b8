"""Launches on a real Slurm of two nodes: trained over both, halted for good, requeued exactly, stopped."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.run_folder import read_jsonl

from .launcher import HALTS, Launcher, wait_for
from .slurm_cluster import slurm, why_not

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def launcher(cluster: dict[str, str], tmp_path: Path) -> Launcher:
    return Launcher(tmp_path, "slurm", {"memory_gib": 4, "cpus": 1, "time": "00:50:00"}, cluster)


def asked(launcher: Launcher, *words: str) -> str:
    """What a program of Slurm says."""
    environment = {**os.environ, **launcher.variables}
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_two_nodes_train_one_run_and_a_requeued_one_ends_with_the_same_weights(launcher: Launcher) -> None:
    steps = 12
    launcher.launch("whole", "--nodes", 2, **{"trl.max_steps": steps})
    assert launcher.ended("whole", 0)["state"] == "succeeded"
    whole = launcher.folder / "runs" / "whole"
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["global_step"] == steps
    for part in ("", "-process-1"):  # each node graded its own answers
        assert len(read_jsonl(whole / "rollouts" / f"step-000001{part}.jsonl")) == 4
    job = launcher.launch("cut", "--nodes", 2, **{"trl.max_steps": steps})["id"]
    cut = launcher.folder / "runs" / "cut"
    wait_for(lambda: len(read_jsonl(cut / "metrics.jsonl")) >= 3)
    asked(launcher, "scontrol", "requeue", job)
    wait_for(lambda: launcher.state("cut") == "waiting")
    saved = list((cut / "checkpoints").glob("checkpoint-*/MANIFEST.json"))
    assert len(saved) == 1  # none was due: the order to end made it
    assert 0 < int(saved[0].parent.name.removeprefix("checkpoint-")) < steps
    asked(launcher, "scontrol", "update", f"JobId={job}", "StartTime=now")
    assert launcher.ended("cut", 0)["state"] == "succeeded"
    assert "Restarts=1" in asked(launcher, "scontrol", "show", "job", job)
    again = json.loads((cut / "summary.json").read_text())
    assert again["parameter_sha256"] == summary["parameter_sha256"]
    assert [row["step"] for row in read_jsonl(cut / "metrics.jsonl")] == list(range(1, steps + 1))


def test_a_halted_run_has_exit_code_5_and_is_not_requeued(launcher: Launcher) -> None:
    job = launcher.launch("halted", **HALTS)["id"]
    answer = launcher.ended("halted", 5)
    assert (answer["state"], answer["exit_code"]) == ("halted", 5)
    assert "guard      halted" in answer["logs"]
    shown = asked(launcher, "scontrol", "show", "job", job)
    assert "JobState=FAILED" in shown
    assert "Restarts=0" in shown
    assert "Requeue=1" in shown  # only for what the run did not decide


def test_an_array_trains_two_replicas_that_agree(launcher: Launcher) -> None:
    """One replica on each node; they meet in a folder, and end with the same weights."""
    replicas = {"replicas.transport": f"file://{launcher.folder}/store", "replicas.sync_every": 2}
    launcher.launch("pair", "--replicas", 2, **{"trl.max_steps": 4, **replicas})
    answer = launcher.ended("pair", 0)
    assert answer["state"] == "succeeded"
    assert answer["logs"].count("== pair-") == 2
    runs = [launcher.folder / "runs" / "pair" / f"replica-{i}" for i in range(2)]
    assert len({json.loads((run / "summary.json").read_text())["parameter_sha256"] for run in runs}) == 1
    assert [read_jsonl(run / "outer_steps.jsonl")[-1]["outer_step"] for run in runs] == [2, 2]


def test_a_stopped_job_has_saved(launcher: Launcher) -> None:
    launcher.launch("stopped", **{"trl.max_steps": 100000})
    run = launcher.folder / "runs" / "stopped"
    wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) >= 1)
    assert launcher.state("stopped") == "running"
    assert launcher("stop", "stopped")["stopped"]
    assert launcher.ended("stopped", 0)["state"] == "stopped"
    wait_for(lambda: any((run / "checkpoints").glob("checkpoint-*/MANIFEST.json")))


@pytest.mark.parametrize(("option", "said"), [("partition=nowhere", "partition"), ("gpu_type=h100", "gres")])
def test_what_slurm_refuses_is_one_sentence_and_nothing_is_submitted(
    launcher: Launcher, option: str, said: str
) -> None:
    gpus = ["--gpus", "1"] if option.startswith("gpu") else []
    answer = launcher.launch("refused", *gpus, "--option", option, code=2)
    assert answer["error"]["code"] == "CR0932"
    assert said in answer["error"]["message"].lower()
    assert not (launcher.folder / "jobs" / "refused" / "job.json").exists()
    assert asked(launcher, "squeue", "--noheader", "--name=refused") == ""
