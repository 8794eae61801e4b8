"""This machine: a process of its own that lives on, torchrun for several GPUs, ``replicas start`` for several replicas."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pydantic import Field

from composer_replication.launch.job import PROGRAM, Job, shell_line
from composer_replication.launch.job_status import JobState, JobStatus, ended
from composer_replication.launch.targets import Target, TargetOptions, filled, require, secrets_are_set


class LocalTarget(Target):
    """Started here, in a session of its own."""

    carries_files = False

    class Options(TargetOptions):
        """``--option`` of ``--to local``."""

        run: str = Field("", description="run folder; empty: runs/NAME")
        python: str = Field(sys.executable, description="the interpreter")

    def render(self, job: Job) -> dict[str, str]:
        require(job.resources.nodes == 1, "local has one node", "--nodes", "take slurm, ray or kubernetes")
        alone = job.replicas == 1 or job.resources.processes == 1
        require(alone, "a replica of local has one process", "--replicas", "take a cluster, or --gpus 1")
        run = os.path.abspath(self.options.run or f"runs/{job.name}")  # noqa: PTH100 - no link is followed
        folder, python = str(job.recipe.parent), self.options.python
        if job.replicas == 1:
            words = job.train_words(folder, run)
            command = job.node_command(python, words, [], port=str(self.options.port), folder=folder)
        else:
            start = f"replicas start --local {job.replicas} --resume --out".split()
            command = [python, "-m", PROGRAM, *start, run, str(job.recipe), *job.setting_words()]
        return {"run.sh": filled("run.sh.j2", job=job, command=shell_line(command))}

    def submit(self, job: Job) -> str:
        secrets_are_set(job)
        with (self.folder / "output.log").open("ab") as log:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            words = ["/bin/bash", "run.sh"]
            started = subprocess.Popen(words, cwd=self.folder, start_new_session=True, **files)  # type: ignore[call-overload]
        return f"{started.pid}:{_started_at(started.pid)}"

    def status(self, job_id: str) -> JobStatus:
        lives = _process(job_id) is not None  # asked first: a job that ends meanwhile has left its exit code
        if (exit_file := self.folder / "exit_code").is_file():
            return ended(int(exit_file.read_text()))
        if lives:
            return JobStatus(JobState.RUNNING)
        return JobStatus(JobState.FAILED, detail="its process is gone and left no exit code: it was killed")

    def logs(self, job_id: str) -> str:
        del job_id
        return (self.folder / "output.log").read_text(errors="replace")

    def stop(self, job_id: str) -> None:
        pid = _process(job_id)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)


def _started_at(pid: int) -> str:
    """When the system started the process, so that another one of the same number is not taken for it; empty: it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _process(job_id: str) -> int | None:
    pid, _, started_at = job_id.partition(":")
    return int(pid) if started_at and _started_at(int(pid)) == started_at else None
