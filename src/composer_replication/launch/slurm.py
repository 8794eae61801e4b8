"""Slurm: one batch script; an array of them for replicas, so that a lost node costs its replica only.

``--requeue`` brings a job back after a preemption or a lost node, never after an exit code.
The script becomes ``srun``, so that signals and exit codes go straight through.
"""

from __future__ import annotations

import os
import re
import sys

from pydantic import Field

from composer_replication.errors import UsageError
from composer_replication.launch.clients import run_client
from composer_replication.launch.job import Job, Variable, shell_line
from composer_replication.launch.job_status import JobState, JobStatus, ended, joined
from composer_replication.launch.targets import Target, TargetOptions, filled, secrets_are_set

SCRIPT_NAME = "job.sbatch"
_INSTALL = "Slurm's client programs (Debian: slurm-client), or launch from a login node"
_STATES = {
    **dict.fromkeys("PENDING CONFIGURING REQUEUED REQUEUE_HOLD SUSPENDED RESIZING".split(), JobState.WAITING),
    **dict.fromkeys("RUNNING COMPLETING STAGE_OUT SIGNALING".split(), JobState.RUNNING),
    **dict.fromkeys("CANCELLED PREEMPTED TIMEOUT DEADLINE".split(), JobState.STOPPED),
}


class SlurmTarget(Target):
    """Submitted by sbatch; the folder of the recipe and the run folder lie on storage that all nodes see."""

    carries_files = False

    class Options(TargetOptions):
        """``--option`` of ``--to slurm``."""

        run: str = Field("", description="run folder on shared storage; empty: runs/NAME")
        python: str = Field(sys.executable, description="the interpreter, on shared storage")
        partition: str = ""
        account: str = ""
        qos: str = ""
        constraint: str = ""
        gpu_type: str = Field("", description="as in gres: h100")
        time: str = Field("24:00:00", pattern=r"^(\d+-)?\d{1,2}(:\d{2}){0,2}$", description="limit")

    def render(self, job: Job) -> dict[str, str]:
        options, folder = self.options, str(job.recipe.parent)
        run = os.path.abspath(options.run or f"runs/{job.name}")  # noqa: PTH100 - no link is followed
        replica = Variable("$SLURM_ARRAY_TASK_ID") if job.replicas > 1 else None
        place = ["--node-rank", Variable("$SLURM_NODEID"), "--head", Variable("$head")]
        port = Variable("$((20000 + SLURM_JOB_ID % 20000))")
        words = job.train_words(folder, run, replica)
        command = shell_line(job.node_command(options.python, words, place, port=port, folder=folder))
        return {SCRIPT_NAME: filled("job.sbatch.j2", job=job, options=options, command=command)}

    def submit(self, job: Job) -> str:
        secrets_are_set(job)
        run_client(["sbatch", "--test-only", SCRIPT_NAME], install=_INSTALL, folder=self.folder)
        said = run_client(["sbatch", "--parsable", SCRIPT_NAME], install=_INSTALL, folder=self.folder)
        return said.split(";")[0].strip()

    def status(self, job_id: str) -> JobStatus:
        return joined([_status(line) for line in _lines(job_id)])

    def logs(self, job_id: str) -> str:
        found = sorted([*self.folder.glob(f"*-{job_id}.log"), *self.folder.glob(f"*-{job_id}_*.log")])
        return "".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in found)

    def stop(self, job_id: str) -> None:
        run_client(["scancel", job_id], install=_INSTALL)


def _lines(job_id: str) -> list[str]:
    """State and exit code of each array task, from the controller, or from its records where it has forgotten them."""
    try:
        said = run_client(["scontrol", "show", "job", "-o", job_id], install=_INSTALL)
    except UsageError as error:
        if "Invalid job id" not in str(error):
            raise
        said = run_client(["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode"], install=_INSTALL)
        said = re.sub(r"(?m)^(\w+)[^|]*\|(\S+)$", r"JobState=\1 ExitCode=\2", said)
    return said.splitlines()


def _status(line: str) -> JobStatus:
    found = dict(re.findall(r"\b(JobState|ExitCode|Reason)=(\S+)", line))
    state, reason = found.get("JobState", ""), found.get("Reason", "None")
    code, _, number = found.get("ExitCode", "0:0").partition(":")
    detail = state if reason == "None" else f"{state}, {reason}"
    if state in _STATES:
        return JobStatus(_STATES[state], detail=detail)
    return ended(128 + int(number) if int(number) else int(code), detail)
