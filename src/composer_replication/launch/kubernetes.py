"""Kubernetes: an Indexed Job for one trainer, a JobSet for replicas; submitted by kubectl.

A run that the guard has halted (exit code 5) fails the Job at once and the whole JobSet with it;
a pod that was told to end (130) or whose node went away is replaced and goes on with its run.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from typing import Any

from pydantic import Field

from composer_replication.errors import HALTED_EXIT_CODE
from composer_replication.launch.clients import refusal, run_client
from composer_replication.launch.job import Job, Variable
from composer_replication.launch.job_status import JobState, JobStatus, told
from composer_replication.launch.targets import Target, TargetOptions, filled

MANIFEST_NAME = "manifests.yaml"
JOB_LABEL = "composer-rl/job"
RECIPE_MOUNT = "/etc/composer-rl/recipe"
DATA_MOUNT = "/data"
_OWN_NAMES = r"(-replica-\d+|-\w{5})?(-\d+|-head|-rollouts-worker)?(-\w{5})?"
"""What Kubernetes, JobSet and KubeRay put behind a job's name for what they make of it."""
_PAIRS = r"^$|^[\w./-]+=[\w./-]*(,[\w./-]+=[\w./-]*)*$"
_TAINTS = r"^$|^[^,:=]+(=[^,:=]*)?:(NoSchedule|PreferNoSchedule|NoExecute)(,[^,:=]+(=[^,:=]*)?:(NoSchedule|PreferNoSchedule|NoExecute))*$"


class ClusterOptions(TargetOptions):
    """Options of everything that runs in pods."""

    image: str = Field(description="container image with composer-replication, see containers/")
    namespace: str = "default"
    context: str = Field("", description="of the kubeconfig; empty: the current one")
    claim: str = Field("", description="persistent volume claim for the run; empty: one is made")
    storage_gib: int = Field(100, ge=1, description="of a claim that is made")
    storage_class: str = Field("", description="of a claim that is made; one that several nodes may write")
    service_account: str = ""
    secret: str = Field("", description="the Secret with the variables of --secret; empty: of the job's name")
    priority_class: str = ""
    tolerates: str = Field("", pattern=_TAINTS, description="taints, KEY=VALUE:EFFECT, several with commas")
    node_selector: str = Field("", pattern=_PAIRS, description="KEY=VALUE, several with commas")
    user_namespaces: bool = Field(default=False, description="what bubblewrap needs; else sandlock is taken")


class KubernetesTarget(Target):
    """Manifests of one job, applied together."""

    class Options(ClusterOptions):
        """``--option`` of ``--to kubernetes``."""

    def render(self, job: Job) -> dict[str, str]:
        return {MANIFEST_NAME: filled("kubernetes.yaml.j2", **self.values(job))}

    def values(self, job: Job) -> dict[str, Any]:
        """What the template is filled with; overlays change some of it."""
        options, keys = self.options, {f"file-{i}": path for i, path in enumerate(sorted(job.files))}
        several = job.replicas > 1
        replica = Variable("$(REPLICA)") if several else None
        head = f"{job.name}-replica-$(REPLICA)-0.{job.name}" if several else f"{job.name}-0.{job.name}"
        place = ["--node-rank", "$(JOB_COMPLETION_INDEX)", "--head", head]
        words = job.train_words(RECIPE_MOUNT, f"{DATA_MOUNT}/{job.name}", replica)
        return {
            "job": job,
            "options": options,
            "kind": "JobSet" if several else "Job",
            "labels": {JOB_LABEL: job.name},
            "command": job.node_command("python", words, place, port=str(options.port), folder=RECIPE_MOUNT),
            "contents": {key: base64.b64encode(job.files[path]).decode() for key, path in keys.items()},
            "items": [{"key": key, "path": path} for key, path in keys.items()],
            "claim": options.claim or f"{job.name}-data",
            "service_account": options.service_account,
            "makes_account": False,
            "node_selector": dict(pair.split("=", 1) for pair in options.node_selector.split(",") if pair),
            "tolerations": [_toleration(text) for text in options.tolerates.split(",") if text],
            "efa": 0,
            "recipe_mount": RECIPE_MOUNT,
            "data_mount": DATA_MOUNT,
        }

    def submit(self, job: Job) -> str:
        """First as a question to the server, then for good; a job that is there already would not start again."""
        path, kind = str(self.folder / MANIFEST_NAME), self.values(job)["kind"].lower()
        said = self._kubectl("apply", "--dry-run=server", "-f", path)
        if not re.search(rf"^{kind}\.\S+/{job.name} created", said, re.MULTILINE):
            raise refusal("kubectl", f"{kind} {job.name} is there: delete it, or take another --name")
        self._kubectl("apply", "-f", path)
        return f"{kind}/{job.name}"

    def status(self, job_id: str) -> JobStatus:
        status = _status(self._found(job_id))
        if status.state is JobState.FAILED and HALTED_EXIT_CODE in self._exit_codes(job_id):
            return JobStatus(JobState.HALTED, HALTED_EXIT_CODE, status.detail)
        return self._with_reason(status, job_id)

    def logs(self, job_id: str) -> str:
        return self._kubectl("logs", *_pods(job_id), "--tail=-1", "--prefix", "--max-log-requests=100")

    def stop(self, job_id: str) -> None:
        """Suspend it: its pods get their time to save, and the job can be resumed."""
        self._kubectl("patch", *_resource(job_id), "--type=merge", "-p", '{"spec": {"suspend": true}}')

    def _found(self, job_id: str) -> Any:
        return json.loads(self._kubectl("get", *_resource(job_id), "-o", "json"))

    def _exit_codes(self, job_id: str) -> list[int]:
        pods = json.loads(self._kubectl("get", "pods", *_pods(job_id), "-o", "json"))["items"]
        statuses = [one for pod in pods for one in pod.get("status", {}).get("containerStatuses", [])]
        return [one["state"]["terminated"]["exitCode"] for one in statuses if "terminated" in one["state"]]

    def _with_reason(self, status: JobStatus, job_id: str) -> JobStatus:
        """Why a job does not start, by the cluster's last warning: an image, a quota, no node with such GPUs."""
        if status.state is not JobState.WAITING:
            return status
        own = re.compile(rf"{job_id.partition('/')[2]}{_OWN_NAMES}")
        said = self._kubectl("get", "events", "--field-selector=type=Warning", "-o", "json")
        found = [one for one in json.loads(said)["items"] if own.fullmatch(one["involvedObject"]["name"])]
        last = max(found, key=lambda one: str(one.get("lastTimestamp")), default=None)
        return replace(status, detail=f"{last['reason']}: {last['message']}") if last else status

    def _kubectl(self, *words: str) -> str:
        context = ["--context", self.options.context] if self.options.context else []
        return run_client(["kubectl", *context, "-n", self.options.namespace, *words], install="kubectl")


def _resource(job_id: str) -> tuple[str, str]:
    kind, _, name = job_id.partition("/")
    return {"jobset": "jobsets.jobset.x-k8s.io", "job": "jobs.batch", "rayjob": "rayjobs.ray.io"}[kind], name


def _pods(job_id: str) -> list[str]:
    return ["-l", f"{JOB_LABEL}={job_id.partition('/')[2]}"]


def _toleration(text: str) -> dict[str, str]:
    pair, _, effect = text.partition(":")
    key, equals, value = pair.partition("=")
    how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, "effect": effect, **how}


def _status(found: dict[str, Any]) -> JobStatus:
    """Of a Job or JobSet."""
    status = found.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", []) if one.get("status") == "True"}
    if {"Complete", "Completed"} & conditions.keys():
        return JobStatus(JobState.SUCCEEDED, 0)
    if "Failed" in conditions:
        failed = conditions["Failed"]
        return told(JobState.FAILED, f"{failed.get('reason', '')}: {failed.get('message', '')}")
    if found.get("spec", {}).get("suspend"):
        return JobStatus(JobState.STOPPED, detail="suspended; kubectl can resume it")
    is_ready = any(one.get("ready") for one in (status, *status.get("replicatedJobsStatus", [])))
    return JobStatus(JobState.RUNNING if is_ready else JobState.WAITING)
