"""Launches on a real Ray of two nodes with token authentication: verdicts come back as exit codes, a lost worker ends the run."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.run_folder import read_jsonl
from composer_replication.tasks.intake.cache import cache_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
from ray_head import START_TRIES, free_port, kill_session, processes, start_ray

pytest.importorskip("ray.job_submission", reason="the extra ray is not installed")

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "run.toml"
WAIT_SECONDS = 600
SETTINGS = {
    "trl.per_device_train_batch_size": 4,
    "trl.num_generations": 4,
    "trl.max_completion_length": 8,
    "heldout.before_and_after_samples": 0,
    "trainer.save_model": "false",
}
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A head with a job server and one further node; the variables by which a client is let in."""
    root = tmp_path_factory.mktemp("ray")
    variables = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1",
        "RAY_agent_register_timeout_ms": "600000", "RAY_worker_niceness": "0", "HF_HUB_OFFLINE": "1",
        "COMPOSER_RL_CACHE": str(cache_folder()),
    }  # fmt: skip
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for attempt in range(START_TRIES):
            port, dashboard = free_port(), free_port()
            head = [
                "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--include-dashboard=true", "--no-monitor",
                f"--ray-client-server-port={free_port()}", "--num-cpus=2",
            ]  # fmt: skip
            nodes.append(start_ray(head, variables, root / f"head-{attempt}"))
            if nodes[-1].poll() is None:
                break
        for attempt in range(START_TRIES):  # a busy machine may not answer in the seconds that Ray gives it
            log = root / f"node-{attempt}"
            nodes.append(start_ray([f"--address=127.0.0.1:{port}", "--num-cpus=2"], variables, log))
            if nodes[-1].poll() is None:
                break
        assert nodes[-1].poll() is None, log.read_text()
        yield {**variables, "DASHBOARD": f"http://127.0.0.1:{dashboard}"}
    finally:
        for node in reversed(nodes):
            kill_session(node.pid)
            node.wait()


def launch(folder: Path, variables: dict[str, str], *words: object, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "composer_replication.cli.main", "launch", *map(str, words), "--json"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def submit(folder: Path, variables: dict[str, str], name: str, *words: object, **settings: object) -> None:
    flags = [part for key, value in {**SETTINGS, **settings}.items() for part in ("--set", f"{key}={value}")]
    options = {
        "address": variables["DASHBOARD"],
        "run": folder / "run" / name,
        "python": sys.executable,
        "cpus": 1,
    }
    given = [part for key, value in options.items() for part in ("--option", f"{key}={value}")]
    launch(folder, variables, RECIPE, "--to", "ray", "--name", name, *given, *flags, *words)


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(4)


def ended(folder: Path, variables: dict[str, str], name: str, code: int) -> dict[str, Any]:
    """Wait for the end; the exit code of ``status`` must be this."""

    def state() -> str:
        command = [sys.executable, "-m", "composer_replication.cli.main", "launch", "status", name, "--json"]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return str(json.loads(done.stdout).get("state", done.stdout))

    wait_for(lambda: state() not in ("waiting", "running"))
    logs = launch(folder, variables, "logs", name)["logs"]
    answer = launch(folder, variables, "status", name, code=code)
    return {**answer, "logs": logs}


def test_two_nodes_train_one_run(cluster: dict[str, str], tmp_path: Path) -> None:
    submit(tmp_path, cluster, "both", "--nodes", 2, "--env", "GIVEN=a b", **{"trl.max_steps": 2})
    answer = ended(tmp_path, cluster, "both", 0)
    assert (answer["state"], answer["exit_code"]) == ("succeeded", 0)
    run = tmp_path / "run" / "both"
    assert json.loads((run / "summary.json").read_text())["global_step"] == 2
    for part in ("", "-process-1"):
        assert len(read_jsonl(run / "rollouts" / f"step-000001{part}.jsonl")) == 4


def test_the_verdict_comes_back_as_exit_code_5(cluster: dict[str, str], tmp_path: Path) -> None:
    halts = {"guard.min_steps": 1, "guard.max_proxy_real_gap": 1e-6, "heldout.every": 1, "trl.max_steps": 40}
    submit(tmp_path, cluster, "halted", **halts)
    answer = ended(tmp_path, cluster, "halted", 5)
    assert (answer["state"], answer["exit_code"]) == ("halted", 5)
    assert "guard      halted" in answer["logs"]


def test_a_killed_worker_ends_the_run_and_the_same_launch_goes_on(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    steps = {"trl.max_steps": 6, "trainer.checkpoint_every": 1}
    submit(tmp_path, cluster, "lost", "--nodes", 2, **steps)
    run = tmp_path / "run" / "lost"
    wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) >= 2)
    trainers = [
        pid for pid, words in processes() if "train recipe/run.toml" in words and "--node-rank 1" in words
    ]
    assert trainers
    os.kill(trainers[0], signal.SIGKILL)
    answer = ended(tmp_path, cluster, "lost", 4)
    assert answer["state"] == "failed"
    assert not (run / "summary.json").exists()
    record = tmp_path / "jobs" / "lost" / "job.json"
    record.unlink()
    submit(tmp_path, cluster, "lost", "--nodes", 2, **steps)
    assert ended(tmp_path, cluster, "lost", 0)["state"] == "succeeded"
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_a_stopped_job_ends(cluster: dict[str, str], tmp_path: Path) -> None:
    submit(tmp_path, cluster, "stopped", **{"trl.max_steps": 100000})
    wait_for(lambda: launch(tmp_path, cluster, "status", "stopped")["state"] == "running")
    assert launch(tmp_path, cluster, "stop", "stopped")["stopped"]
    assert ended(tmp_path, cluster, "stopped", 0)["state"] == "stopped"


def test_a_wrong_token_and_a_wrong_address_are_one_sentence(cluster: dict[str, str], tmp_path: Path) -> None:
    options = ["--option", f"run={tmp_path}/run", "--to", "ray"]
    wrong = {**cluster, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for variables, address in ((wrong, cluster["DASHBOARD"]), (cluster, f"http://127.0.0.1:{free_port()}")):
        answer = launch(tmp_path, variables, RECIPE, *options, "--option", f"address={address}", code=2)
        assert answer["error"]["code"] == "CR0932"
    assert not list((tmp_path / "jobs").rglob("job.json"))
