"""Launches on a real Ray of two nodes with token authentication: verdicts come back as exit codes, a lost worker ends the run."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray_head import START_TRIES, free_port, kill_session, processes, start_ray

from composer_replication.run_folder import read_jsonl
from composer_replication.tasks.intake.cache import cache_folder

from .launcher import HALTS, Launcher, wait_for

pytest.importorskip("ray.job_submission", reason="the extra ray is not installed")

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A head with a job server and one further node; the variables by which a client is let in."""
    root = tmp_path_factory.mktemp("ray")
    variables = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1",
        "RAY_agent_register_timeout_ms": "600000", "RAY_worker_niceness": "0", "HF_HUB_OFFLINE": "1",
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600", "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "600",
        "COMPOSER_RL_CACHE": str(cache_folder()),
    }  # fmt: skip
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        port, dashboard, client = free_port(), free_port(), free_port()
        head = [
            "--head",
            f"--port={port}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}",
        ]
        for words in ([*head, "--include-dashboard=true", "--no-monitor"], [f"--address=127.0.0.1:{port}"]):
            for _ in range(START_TRIES):  # a busy machine may not answer in the seconds that Ray gives it
                nodes.append(start_ray([*words, "--num-cpus=2"], variables, root / f"log-{len(nodes)}"))
                if nodes[-1].poll() is None:
                    break
            assert nodes[-1].poll() is None
        yield {**variables, "DASHBOARD": f"http://127.0.0.1:{dashboard}"}
    finally:
        for node in reversed(nodes):
            kill_session(node.pid)
            node.wait()


@pytest.fixture
def launcher(cluster: dict[str, str], tmp_path: Path) -> Launcher:
    run, address = f"{tmp_path}/run/{{name}}", cluster["DASHBOARD"]
    return Launcher(
        tmp_path, "ray", {"address": address, "run": run, "python": sys.executable, "cpus": 1}, cluster
    )


def test_the_verdict_comes_back_as_exit_code_5(launcher: Launcher) -> None:
    launcher.launch("halted", **HALTS)
    answer = launcher.ended("halted", 5)
    assert (answer["state"], answer["exit_code"]) == ("halted", 5)
    assert "guard      halted" in answer["logs"]


def test_a_killed_worker_ends_the_run_and_the_same_launch_goes_on(launcher: Launcher) -> None:
    steps = {"trl.max_steps": 6, "trainer.checkpoint_every": 1}
    launcher.launch("lost", "--nodes", 2, "--env", "GIVEN=a b", **steps)
    run = launcher.folder / "run" / "lost"
    wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) >= 2)
    trainers = [
        pid for pid, words in processes() if "train recipe/run.toml" in words and "--node-rank 1" in words
    ]
    assert trainers
    assert b"\0GIVEN=a b\0" in Path(f"/proc/{trainers[0]}/environ").read_bytes()
    os.kill(trainers[0], signal.SIGKILL)
    answer = launcher.ended("lost", 4)
    assert answer["state"] == "failed"
    assert not (run / "summary.json").exists()
    (launcher.folder / "jobs" / "lost" / "job.json").unlink()
    launcher.launch("lost", "--nodes", 2, **steps)
    assert launcher.ended("lost", 0)["state"] == "succeeded"
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_stopped_job_has_saved(nodes: int, launcher: Launcher) -> None:
    launcher.launch("stopped", "--nodes", nodes, **{"trl.max_steps": 100000})
    run = launcher.folder / "run" / "stopped"
    wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) >= 1)
    assert launcher.state("stopped") == "running"
    assert launcher("stop", "stopped")["stopped"]
    assert launcher.ended("stopped", 0)["state"] == "stopped"
    wait_for(lambda: any((run / "checkpoints").glob("checkpoint-*/MANIFEST.json")))


def test_a_wrong_token_and_a_wrong_address_are_one_sentence(launcher: Launcher) -> None:
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    nowhere = {**launcher.options, "address": f"http://127.0.0.1:{free_port()}"}
    for wrong in (
        replace(launcher, variables={**launcher.variables, **token}),
        replace(launcher, options=nowhere),
    ):
        assert wrong.launch("refused", code=2)["error"]["code"] == "CR0932"
    assert not list((launcher.folder / "jobs").rglob("job.json"))
