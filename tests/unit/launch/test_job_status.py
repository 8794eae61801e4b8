"""How a job stands, by what schedulers say of it: a halt is a halt, whoever tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.launch import sagemaker, skypilot
from composer_replication.launch.job_status import JobState, told
from composer_replication.launch.targets import open_target


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("command failed with exit code 5", "halted"),
        ("AlgorithmError: , exit code: 5", "halted"),
        ("Job exited with exit codes [5, 1]", "halted"),
        ("Job exited with exit codes [1, 5]", "halted"),
        ("command failed with exit code 51", "failed"),
        ("Job exited with exit codes [1, 15]", "failed"),
        ("5 nodes failed with exit code 1", "failed"),
    ],
)
def test_a_halt_in_a_sentence(said: str, state: str) -> None:
    assert told(JobState.FAILED, said).state == state
    assert sagemaker._status({"TrainingJobStatus": "Failed", "FailureReason": said}).state == state
    assert skypilot._status({"status": "ManagedJobStatus.FAILED", "failure_reason": said}).state == state


@pytest.mark.parametrize(
    ("records", "state", "code"),
    [
        ("COMPLETED|0:0", "succeeded", 0),
        ("FAILED|5:0", "halted", 5),
        ("FAILED|1:0", "failed", 1),
        ("FAILED|130:0", "stopped", 130),
        ("CANCELLED by 1000|0:15", "stopped", None),
        ("COMPLETED|0:0\nFAILED|5:0", "halted", 5),
        ("OUT_OF_MEMORY|0:125", "failed", 253),
    ],
)
def test_slurm_is_asked_for_its_records_where_it_has_forgotten_a_job(
    records: str, state: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five minutes after its end, by Slurm's default. The programs are stand-ins that print what Slurm's do."""
    for name, line in {
        "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
        "sacct": f"printf '{records}\\n'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    status = open_target("slurm", {}, tmp_path).status("12")
    assert (status.state, status.exit_code) == (state, code)
