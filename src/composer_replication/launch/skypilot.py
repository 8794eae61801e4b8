"""SkyPilot: a managed job on the cloud, Kubernetes or Slurm that is cheapest or named, brought back when spot instances go.

Its client is the program ``sky`` of an
environment of its own: its bounds do not fit ours.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import Field

from composer_replication.errors import ComposerError
from composer_replication.launch.clients import refusal, run_client
from composer_replication.launch.job import (
    HALTED_EXIT_CODE,
    Job,
    JobState,
    JobStatus,
    Variable,
    joined,
    shell_line,
)
from composer_replication.launch.targets import Target, TargetOptions, filled, option_error

TASK_NAME = "task-{}.yaml"
RECIPE_MOUNT = "/tmp/composer-rl-recipe"  # noqa: S108 - on a machine that is made for the job
RUN_MOUNT = "/composer-rl-run"
_INSTALL = "SkyPilot in an environment of its own: pipx install skypilot"
_STATES = {
    "SUCCEEDED": JobState.SUCCEEDED,
    "CANCELLED": JobState.STOPPED,
    "CANCELLING": JobState.STOPPED,
    "RUNNING": JobState.RUNNING,
    "WINDING_DOWN": JobState.RUNNING,
    "RECOVERING": JobState.WAITING,
    "PENDING": JobState.WAITING,
    "SUBMITTED": JobState.WAITING,
    "STARTING": JobState.WAITING,
}


class SkyPilotTarget(Target):
    """One managed job a replica."""

    class Options(TargetOptions):
        """``--option`` of ``--to skypilot``."""

        infra: str = Field("", description="aws/us-east-1, k8s/CONTEXT, slurm/CLUSTER; empty: the cheapest")
        image: str = Field(description="docker:IMAGE with composer-replication")
        gpu_type: str = Field("", description="H100, where --gpus is given")
        spot: bool = False
        store: str = Field(
            description="bucket for the run: s3://NAME or gs://NAME", pattern="^(s3|gs|r2|cos|nebius)://.+$"
        )

    def render(self, job: Job) -> dict[str, str]:
        if job.resources.gpus and not self.options.gpu_type:
            raise option_error(
                "skypilot needs to know which GPUs",
                where="--option gpu_type",
                fix="for example gpu_type=H100",
            )
        return {TASK_NAME.format(i): self._task(job, i) for i in range(job.replicas)}

    def _task(self, job: Job, replica: int) -> str:
        words = job.train_words(
            RECIPE_MOUNT, f"{RUN_MOUNT}/{job.name}", str(replica) if job.replicas > 1 else None
        )
        place = [
            "--node-rank",
            Variable("$SKYPILOT_NODE_RANK"),
            "--head",
            Variable("$(echo $SKYPILOT_NODE_IPS | cut -d ' ' -f 1)"),
        ]
        command = job.node_command("python", words, place, port=str(self.options.port), folder=RECIPE_MOUNT)
        return filled(
            "task.yaml.j2",
            job=job,
            options=self.options,
            name=f"{job.name}-{replica}" if job.replicas > 1 else job.name,
            command=shell_line(command),
            recipe_mount=RECIPE_MOUNT,
            run_mount=RUN_MOUNT,
        )

    def submit(self, job: Job) -> str:
        """Each replica's job; what was begun is cancelled when a later one is refused."""
        secrets = [part for name in job.secrets for part in ("--secret", name)]
        submitted: list[str] = []
        try:
            for i in range(job.replicas):
                said = run_client(
                    ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, TASK_NAME.format(i)],
                    install=_INSTALL,
                    folder=self.folder,
                )
                found = re.search(r"[Jj]ob(?: submitted)?,? ID:? (\d+)", said)
                if found is None:
                    raise refusal("sky", said)
                submitted.append(found[1])
        except ComposerError:
            if submitted:
                run_client(["sky", "jobs", "cancel", "--yes", *submitted], install=_INSTALL)
            raise
        return ",".join(submitted)

    def status(self, job_id: str) -> JobStatus:
        wanted = {int(one) for one in job_id.split(",")}
        rows = json.loads(run_client(["sky", "jobs", "queue", "--output", "json"], install=_INSTALL))
        return joined([_status(row) for row in rows if row.get("job_id") in wanted])

    def logs(self, job_id: str) -> str:
        return "".join(
            run_client(["sky", "jobs", "logs", "--no-follow", one], install=_INSTALL)
            for one in job_id.split(",")
        )

    def stop(self, job_id: str) -> None:
        run_client(["sky", "jobs", "cancel", "--yes", *job_id.split(",")], install=_INSTALL)


def _status(row: dict[str, Any]) -> JobStatus:
    said = str(row.get("failure_reason") or row.get("status", ""))
    state = _STATES.get(str(row.get("status", "")).rpartition(".")[2], JobState.FAILED)
    if state is JobState.FAILED and re.search(rf"exit codes?\D{{0,20}}\b{HALTED_EXIT_CODE}\b", said):
        return JobStatus(JobState.HALTED, HALTED_EXIT_CODE, said)
    return JobStatus(state, 0 if state is JobState.SUCCEEDED else None, said)
