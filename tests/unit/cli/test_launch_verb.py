"""``composer-rl launch``: what is refused, what is kept of a job, and jobs of this machine from start to end."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import build_parser, main
from composer_replication.launch import local

Answer = Callable[..., tuple[int, dict[str, Any]]]
RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"
KUBERAY = ("--to", "kuberay", "--option", "image=i")
LOCAL = ("launch", str(RECIPE), "--to", "local")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--to", "slurmm"), "CR0930", "did you mean slurm"),
        (("--to", "slurm", "--option", "partitions=x"), "CR0930", "the nearest is partition"),
        (("--to", "slurm", "--option", "cpus=0"), "CR0930", "greater than or equal to 1"),
        (("--to", "ray", "--option", "run=/x"), "CR0930", "needs the option address"),
        (
            ("--to", "eks", "--option", "image=i", "--option", "cluster=c", "--option", "region=us east"),
            "CR0930",
            "region",
        ),
        (("--to", "local", "--option", "cpus"), "CR0206", "is not NAME="),
        (("--to", "local", "--nodes", "2"), "CR0930", "one node"),
        (("--to", "local", "--nodes", "0"), "CR0930", "at least 1"),
        (("--to", "local", "--replicas", "2", "--gpus", "2"), "CR0930", "one process"),
        (("--to", "local", "--name", "A_b"), "CR0930", "the name"),
        (("--to", "local", "--env", "1=2"), "CR0930", "no name of a variable"),
        (("--to", "local", "--accelerate", "no.yaml"), "CR0930", "no file no.yaml"),
        ((*KUBERAY, "--replicas", "2", "--set", "replicas.transport=s3://b"), "CR0930", "one replica"),
        (("--to", "slurm", "--replicas", "2"), "CR0204", "replicas.transport is missing"),
        (("--to", "slurm", "--set", "replicas.transport=s3://b"), "CR0930", "for 2 replicas"),
        (
            ("--to", "ray", "--option", "address=http://x", "--option", "run=/x", "--secret", "A"),
            "CR0930",
            "would show A",
        ),
        (("--to", "local", "--set", "trl.max_step=1", "--set", "modl.name=x"), "CR0204", "unknown key"),
        ((), "CR0206", "--to is missing"),
    ],
)
def test_what_is_refused_before_anything_is_written(
    words: tuple[str, ...], code: str, said: str, tmp_path: Path, answer: Answer
) -> None:
    exit_code, result = answer("launch", str(RECIPE), *words)
    assert (exit_code, result["error"]["code"]) == (2, code)
    assert said in " ".join(result["error"].values())
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_is_not_there_too_large_or_with_tasks_elsewhere(tmp_path: Path, answer: Answer) -> None:
    assert answer("launch", "none.toml", "--to", "local")[1]["error"]["code"] == "CR0201"
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    recipe = folder / "run.toml"
    recipe.write_text(RECIPE.read_text().replace('"project"', '"../project"'))
    (tmp_path / "project").mkdir()
    on_ray = ("launch", str(recipe), "--to", "ray", "--option", "address=http://x", "--option", "run=/x")
    assert "outside the recipe's folder" in answer(*on_ray)[1]["error"]["message"]
    assert answer("launch", str(recipe), "--to", "slurm", "--dry-run")[0] == 0  # shared storage has both
    (folder / "large").write_bytes(bytes(900_001))
    assert "more than 900000 bytes" in answer(*on_ray)[1]["error"]["message"]


def test_a_client_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    exit_code, result = answer("launch", str(RECIPE), "--to", "slurm")
    assert (exit_code, result["error"]["code"]) == (3, "CR0440")
    assert not list(tmp_path.rglob("job.json"))


IMAGE = ("--option", "image=docker:i", "--option", "store=s3://b")
CLIENTS = {
    "slurm": ("sbatch", (), "12", ["--test-only job.sbatch", "--parsable job.sbatch"]),
    "kubernetes": ("kubectl", IMAGE[:2], "job/tiny-cpu", ["-n default apply --dry-run=server -f FILE", "-n default apply -f FILE"]),
    "skypilot": ("sky", IMAGE, "7", ["jobs launch --yes --detach-run task-tiny-cpu.yaml"]),
}  # fmt: skip
"""The program, options, the id that comes back, and how it is called: where it can, first as a question."""


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("target", CLIENTS)
def test_what_the_client_refuses_is_submitted_nowhere(
    target: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
) -> None:  # fmt: skip
    """The program is a stand-in; real ones are met in tests/e2e and tests/interop."""
    name, options, job_id, calls = CLIENTS[target]
    says = {
        "slurm": "12",
        "kubernetes": "job.batch/tiny-cpu created (server dry run)",
        "skypilot": "Job submitted, ID: 7",
    }[target]
    answers = "echo 'quota exceeded' >&2; exit 1" if is_refused else f"echo '{says}'"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n{answers}\n')
    (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    exit_code, result = answer("launch", str(RECIPE), "--to", target, *options)
    file = str(tmp_path / "jobs" / "tiny-cpu" / "manifests.yaml")
    called = (tmp_path / "calls").read_text().replace(file, "FILE").splitlines()
    if is_refused:
        assert (exit_code, result["error"]["code"], called) == (2, "CR0932", calls[:1])
        assert "quota exceeded" in result["error"]["message"]
    else:
        assert (exit_code, result["id"], called) == (0, job_id, calls)
    assert bool(list(tmp_path.rglob("job.json"))) != is_refused


@pytest.mark.parametrize(
    ("target", "options", "package", "extra"),
    [
        ("ray", ("address=http://127.0.0.1:1", "run=/x"), "ray", "ray"),
        ("sagemaker", ("region=us-east-1", "role=r", "image=i", "instance_type=m", "bucket=s3://b"), "botocore", "aws"),
        ("eks", ("region=us-east-1", "image=i", "cluster=c"), "boto3", "aws"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named(
    target: str, options: tuple[str, ...], package: str, extra: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer,
) -> None:  # fmt: skip
    for name in (package, *(name for name in sys.modules if name.startswith(f"{package}."))):
        monkeypatch.setitem(sys.modules, name, None)
    given = [part for one in options for part in ("--option", one)]
    exit_code, result = answer("launch", str(RECIPE), "--to", target, *given)
    assert (exit_code, result["error"]["code"]) == (3, "CR0101")
    assert package in result["error"]["message"]
    assert result["error"]["fix"] == f"pip install 'composer-replication[{extra}]'"
    assert not list(tmp_path.rglob("job.json"))


@pytest.mark.parametrize("target", ["local", "slurm"])
def test_a_secret_that_is_not_set_here(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    exit_code, result = answer("launch", str(RECIPE), "--to", target, "--secret", "HF_TOKEN")
    assert (exit_code, result["error"]["code"]) == (2, "CR0930")
    assert result["error"]["fix"] == "export HF_TOKEN first."
    assert not list(tmp_path.rglob("job.json"))


def test_a_job_that_was_never_launched(answer: Answer) -> None:
    exit_code, result = answer("launch", "status", "nothing")
    assert (exit_code, result["error"]["code"]) == (4, "CR0930")
    assert answer("launch", "status")[1]["error"]["code"] == "CR0206"


def test_options_of_a_file_and_of_the_command_line(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "cluster.toml").write_text('[slurm]\npartition = "gpu"\ncpus = 7\n')
    words = ("launch", str(RECIPE), "--to", "slurm", "--dry-run", "--options", "cluster.toml")
    script = answer(*words, "--option", "cpus=9")[1]["files"]["job.sbatch"]
    assert "--partition=gpu" in script
    assert "--cpus-per-task=9" in script
    assert not (tmp_path / "jobs").exists()
    assert answer(*words, "--out", "shown")[1]["state"] == "rendered"
    assert (tmp_path / "shown" / "job.sbatch").is_file()
    assert (tmp_path / "shown" / "recipe" / "run.toml").read_bytes() == RECIPE.read_bytes()
    (tmp_path / "cluster.toml").write_text("slurm = 3\n")
    assert answer(*words)[1]["error"]["code"] == "CR0930"


def test_replicas_of_this_machine_start_and_go_on(answer: Answer) -> None:
    script = answer(*LOCAL, "--replicas", "2", "--dry-run")[1]["files"]["run.sh"]
    words = shlex.split(next(line for line in script.splitlines() if "replicas start" in line))
    options = build_parser(only="replicas").parse_args(words[3:-1])
    assert (options.local, options.resume, options.recipe, words[-1]) == (2, True, RECIPE, "&")


@pytest.mark.parametrize("words", [("--min-replicas", "0"), ("--grace-seconds", "0")])
def test_a_lighthouse_that_cannot_be_is_a_mistake_of_the_command(words: tuple[str, str]) -> None:
    assert main(["replicas", "lighthouse", *words]) == 2


def program(tmp_path: Path, text: str) -> str:
    """A program in the place of Python, so that a job lasts no longer than the test needs."""
    path = tmp_path / "program"
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return f"python={path}"


def state(answer: Answer) -> tuple[int, dict[str, Any]]:
    deadline = time.monotonic() + 60
    while True:
        code, result = answer("launch", "status", "tiny-cpu")
        if result["state"] != "running" or time.monotonic() > deadline:
            return code, result
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("ends", "state_of", "code"), [(0, "succeeded", 0), (5, "halted", 5), (1, "failed", 4)]
)
def test_a_local_job_ends_with_the_exit_code_of_its_run(
    ends: int, state_of: str, code: int, tmp_path: Path, answer: Answer
) -> None:
    option = program(tmp_path, f"import os; print('given', os.environ['GIVEN']); raise SystemExit({ends})")
    assert answer(*LOCAL, "--option", option, "--env", "GIVEN=a b")[0] == 0
    exit_code, result = state(answer)
    assert (exit_code, result["state"], result["exit_code"]) == (code, state_of, ends)
    assert answer("launch", "logs", "tiny-cpu")[1]["logs"] == "given a b\n"
    assert answer(*LOCAL, "--option", option)[1]["error"]["code"] == "CR0231"


def test_a_local_job_that_is_stopped_hears_it_itself(tmp_path: Path, answer: Answer) -> None:
    text = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(130)))\n"
        "print('ready', flush=True)\ntime.sleep(100)"
    )
    answer(*LOCAL, "--option", program(tmp_path, text))
    while "ready" not in answer("launch", "logs", "tiny-cpu")[1]["logs"]:
        time.sleep(0.1)
    assert answer("launch", "status", "tiny-cpu")[1]["state"] == "running"
    answer("launch", "stop", "tiny-cpu")
    assert state(answer)[1]["state"] == "stopped"
    assert "saved" in answer("launch", "logs", "tiny-cpu")[1]["logs"]


def test_a_local_job_that_ends_while_it_is_looked_at_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_now(job_id: str) -> None:
        (tmp_path / "exit_code").write_text("5\n")

    monkeypatch.setattr(local, "_process", ends_now)
    target = local.LocalTarget(local.LocalTarget.Options(), tmp_path)
    assert target.status("1:1").state == "halted"
