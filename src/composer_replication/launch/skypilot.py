"""SkyPilot: a managed job on the cloud, Kubernetes or Slurm that is cheapest or named, brought back when spot instances go.

Its client is the program ``sky`` of an environment of its own: its bounds do not fit ours.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import Field

from composer_replication.launch.clients import refusal, run_client
from composer_replication.launch.job import Job, Variable, shell_line
from composer_replication.launch.job_status import JobState, JobStatus, joined, told
from composer_replication.launch.targets import Target, TargetOptions, filled, require

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
        store: str = Field(pattern="^(s3|gs|r2|cos|nebius)://.+$", description="the run's bucket: s3://NAME")

    def render(self, job: Job) -> dict[str, str]:
        is_known = bool(self.options.gpu_type) or not job.resources.gpus
        require(is_known, "skypilot needs to know which GPUs", "--option gpu_type", "give gpu_type=H100")
        return {TASK_NAME.format(name): self._task(job, name, i) for name, i in job.each_replica()}

    def _task(self, job: Job, name: str, replica: str | None) -> str:
        head = Variable("$(echo $SKYPILOT_NODE_IPS | cut -d ' ' -f 1)")
        place = ["--node-rank", Variable("$SKYPILOT_NODE_RANK"), "--head", head]
        words = job.train_words(RECIPE_MOUNT, f"{RUN_MOUNT}/{job.name}", replica)
        command = job.node_command("python", words, place, port=str(self.options.port), folder=RECIPE_MOUNT)
        values = {"job": job, "options": self.options, "name": name, "command": shell_line(command)}
        return filled("task.yaml.j2", **values, recipe_mount=RECIPE_MOUNT, run_mount=RUN_MOUNT)

    def submit(self, job: Job) -> str:
        secrets = [part for name in job.secrets for part in ("--secret", name)]

        def submit(name: str) -> str:
            said = self._sky("launch", "--yes", "--detach-run", *secrets, TASK_NAME.format(name))
            found = re.search(r"Job submitted, ID: (\d+)", said)
            if found is None:
                raise refusal("sky", said)
            return found[1]

        return self.submit_each([name for name, _ in job.each_replica()], submit)

    def status(self, job_id: str) -> JobStatus:
        rows = json.loads(self._sky("queue", "--output", "json"))
        return joined([_status(row) for row in rows if str(row.get("job_id")) == job_id])

    def logs(self, job_id: str) -> str:
        return self._sky("logs", "--no-follow", job_id)

    def stop(self, job_id: str) -> None:
        self._sky("cancel", "--yes", job_id)

    def _sky(self, *words: str) -> str:
        return run_client(["sky", "jobs", *words], install=_INSTALL, folder=self.folder)


def _status(row: dict[str, Any]) -> JobStatus:
    said = str(row.get("failure_reason") or row.get("status", ""))
    state = _STATES.get(str(row.get("status", "")).rpartition(".")[2], JobState.FAILED)
    return told(state, said)
