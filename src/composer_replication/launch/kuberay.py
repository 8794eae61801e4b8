"""KubeRay: a Ray cluster of its own for one run. The head trains, workers attempt and grade tasks (``ray.address``)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from composer_replication.launch.job import Job, shell_line
from composer_replication.launch.job_status import JobState, JobStatus, told
from composer_replication.launch.kubernetes import DATA_MOUNT, RECIPE_MOUNT, ClusterOptions, KubernetesTarget
from composer_replication.launch.targets import require


class KubeRayTarget(KubernetesTarget):
    """A RayJob; its operator makes the cluster and takes it away again."""

    class Options(ClusterOptions):
        """``--option`` of ``--to kuberay``."""

        rollout_workers: int = Field(2, ge=1, description="pods that attempt and grade tasks")
        worker_image: str = Field("", description="container image of theirs; empty: the same")
        worker_cpus: int = Field(4, ge=1, description="cores of each of them")
        ray_version: str = Field("2.60.0", description="of Ray in the image")

    def values(self, job: Job) -> dict[str, Any]:
        """The command goes to the head, by Ray's job server."""
        require(job.resources.nodes == 1, "kuberay trains on one node", "--nodes", "take kubernetes for more")
        require(job.replicas == 1, "kuberay runs one replica", "--replicas", "take kubernetes for several")
        words = [*job.train_words(RECIPE_MOUNT, f"{DATA_MOUNT}/{job.name}"), "--ray", "auto"]
        command = job.node_command("python", words, [], port=str(self.options.port), folder=RECIPE_MOUNT)
        return super().values(job) | {"kind": "RayJob", "entrypoint": shell_line(command)}

    def status(self, job_id: str) -> JobStatus:
        found = self._found(job_id).get("status", {})
        if found.get("jobDeploymentStatus") == "Suspended":
            return JobStatus(JobState.STOPPED, detail="suspended; kubectl can resume it")
        state = JobState.__members__.get(found.get("jobStatus", ""), JobState.WAITING)  # Ray's names are ours
        return self._with_reason(told(state, found.get("message", "")), job_id)
