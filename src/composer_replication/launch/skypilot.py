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
    **dict.fromkeys(("RUNNING", "WINDING_DOWN"), JobState.RUNNING),
    **dict.fromkeys(("RECOVERING", "PENDING", "SUBMITTED", "STARTING"), JobState.WAITING),
    **dict.fromkeys(("CANCELLED", "CANCELLING"), JobState.STOPPED),
    "SUCCEEDED": JobState.SUCCEEDED,
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
            pattern="^(s3|gs|r2|cos|nebius)://.+$", description="bucket for the run: s3://NAME"
        )

    def render(self, job: Job) -> dict[str, str]:
        if job.resources.gpus and not self.options.gpu_type:
            raise option_error("skypilot needs to know which GPUs", "--option gpu_type", "give gpu_type=H100")
        return {TASK_NAME.format(name): self._task(job, name, i) for name, i in job.each_replica()}

    def _task(self, job: Job, name: str, replica: str | None) -> str:
        head = Variable("$(echo $SKYPILOT_NODE_IPS | cut -d ' ' -f 1)")
        place = ["--node-rank", Variable("$SKYPILOT_NODE_RANK"), "--head", head]
        words = job.train_words(RECIPE_MOUNT, f"{RUN_MOUNT}/{job.name}", replica)
        command = job.node_command("python", words, place, port=str(self.options.port), folder=RECIPE_MOUNT)
        values = {"job": job, "options": self.options, "name": name, "command": shell_line(command)}
        return filled("task.yaml.j2", **values, recipe_mount=RECIPE_MOUNT, run_mount=RUN_MOUNT)

    def submit(self, job: Job) -> str:
        """Each replica's job; what was begun is cancelled when a later one is refused."""
        secrets = [part for name in job.secrets for part in ("--secret", name)]
        submitted: list[str] = []
        try:
            for name, _ in job.each_replica():
                said = self._sky("launch", "--yes", "--detach-run", *secrets, TASK_NAME.format(name))
                found = re.search(r"Job submitted, ID: (\d+)", said)
                if found is None:
                    raise refusal("sky", said)
                submitted.append(found[1])
        except ComposerError:
            if submitted:
                self.stop(",".join(submitted))
            raise
        return ",".join(submitted)

    def status(self, job_id: str) -> JobStatus:
        wanted, rows = job_id.split(","), json.loads(self._sky("queue", "--output", "json"))
        return joined([_status(row) for row in rows if str(row.get("job_id")) in wanted])

    def logs(self, job_id: str) -> str:
        return "".join(self._sky("logs", "--no-follow", one) for one in job_id.split(","))

    def stop(self, job_id: str) -> None:
        self._sky("cancel", "--yes", *job_id.split(","))

    def _sky(self, *words: str) -> str:
        return run_client(["sky", "jobs", *words], install=_INSTALL, folder=self.folder)


def _status(row: dict[str, Any]) -> JobStatus:
    said = str(row.get("failure_reason") or row.get("status", ""))
    state = _STATES.get(str(row.get("status", "")).rpartition(".")[2], JobState.FAILED)
    if state is JobState.FAILED and re.search(rf"exit codes?\D{{0,20}}\b{HALTED_EXIT_CODE}\b", said):
        return JobStatus(JobState.HALTED, HALTED_EXIT_CODE, said)
    return JobStatus(state, 0 if state is JobState.SUCCEEDED else None, said)
