"""KubeRay: a Ray cluster of its own for one run. The head trains, workers attempt and grade tasks (``ray.address``)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from composer_replication.launch.job import HALTED_EXIT_CODE, Job, JobState, JobStatus, shell_line
from composer_replication.launch.kubernetes import DATA_MOUNT, RECIPE_MOUNT, ClusterOptions, KubernetesTarget
from composer_replication.launch.targets import one_node, option_error

_STATES = {
    "SUCCEEDED": JobState.SUCCEEDED,
    "FAILED": JobState.FAILED,
    "STOPPED": JobState.STOPPED,
    "RUNNING": JobState.RUNNING,
}


class KubeRayTarget(KubernetesTarget):
    """A RayJob; its operator makes the cluster and takes it away again."""

    class Options(ClusterOptions):
        """``--option`` of ``--to kuberay``."""

        rollout_workers: int = Field(2, ge=1, description="pods that attempt and grade tasks")
        worker_cpus: int = Field(4, ge=1, description="cores of each of them")
        ray_version: str = Field("2.60.0", description="of Ray in the image")

    def values(self, job: Job) -> dict[str, Any]:
        """The command goes to the head, by Ray's job server."""
        one_node(job, "kuberay")
        if job.replicas > 1:
            raise option_error("kuberay runs one replica", "--replicas", "take kubernetes for several")
        words = [*job.train_words(RECIPE_MOUNT, f"{DATA_MOUNT}/{job.name}"), "--ray", "auto"]
        command = job.node_command("python", words, [], port=str(self.options.port), folder=RECIPE_MOUNT)
        return super().values(job) | {"kind": "RayJob", "entrypoint": shell_line(command)}

    def submit(self, job: Job) -> str:
        super().submit(job)
        return f"rayjob/{job.name}"

    def status(self, job_id: str) -> JobStatus:
        found = self._found(job_id).get("status", {})
        said, state = found.get("message", ""), _STATES.get(found.get("jobStatus", ""), JobState.WAITING)
        if found.get("jobDeploymentStatus") == "Suspended":
            return JobStatus(JobState.STOPPED, detail="suspended; kubectl can resume it")
        if state is JobState.FAILED and f"exit code {HALTED_EXIT_CODE}" in said:
            return JobStatus(JobState.HALTED, HALTED_EXIT_CODE, said)
        return JobStatus(state, 0 if state is JobState.SUCCEEDED else None, said)
