"""What the cluster says about a pod, in three words or as a failure with one sentence.

Reference: kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from composer_replication.sandbox.jailed_tree import failure

TASK, STAGE = "task", "stage"
# No waiting helps: a person has to change something.
_HOPELESS = (
    "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull", "ImageInspectError",
    "ImagePullBackOff", "InvalidImageName", "RegistryUnavailable", "RunContainerError", "StartError",
)  # fmt: skip
# As the kubelet words them (pkg/kubelet/eviction/eviction_manager.go); a node that is short of storage is another matter.
_OUR_OWN_LIMIT = (
    "usage of emptydir volume",
    "exceeded its local ephemeral storage limit",
    "ephemeral local storage usage exceeds the total limit",
)


@dataclass(frozen=True, slots=True)
class PodState:
    """``kind`` is waiting, staging (files may be sent) or ready (commands may run)."""

    kind: Literal["waiting", "staging", "ready"]
    why: str = ""
    num_restarts: int = 0
    is_out_of_memory: bool = False
    """Whether the last restart of the task's container was for its memory."""


def state_of(pod: Mapping[str, Any]) -> PodState:
    """Read a pod.

    Raises:
        SandboxFailure: it cannot start (CR0334), or it is lost (CR0335).
    """
    status = pod.get("status") or {}
    name = str((pod.get("metadata") or {}).get("name", ""))
    _refuse_lost(pod, status, name)
    task = next(iter(_statuses(status, "containerStatuses", TASK)), {})
    stage = next(iter(_statuses(status, "initContainerStatuses", STAGE)), {})
    for container in (stage, task):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            raise failure("CR0334", f"the pod does not start: {_said(waiting)}.", name)
    ended = (stage.get("state") or {}).get("terminated") or {}
    if ended.get("exitCode"):
        raise failure("CR0334", f"the pod does not start: its stage ended with {_said(ended)}.", name)
    last = ((task.get("lastState") or {}).get("terminated") or {}) or (
        (task.get("state") or {}).get("terminated") or {}
    )
    num_restarts = int(task.get("restartCount") or 0)
    is_out_of_memory = last.get("reason") == "OOMKilled"
    if "running" in (task.get("state") or {}):
        return PodState("ready", "", num_restarts, is_out_of_memory)
    if "running" in (stage.get("state") or {}):
        return PodState("staging", "", num_restarts, is_out_of_memory)
    return PodState("waiting", _why(status, task, stage), num_restarts, is_out_of_memory)


def is_over_own_disk_limit(pod: Mapping[str, Any]) -> bool:
    """Whether it was evicted for what the command wrote: the command's doing, not the cluster's."""
    status = pod.get("status") or {}
    return status.get("reason") == "Evicted" and any(
        word in str(status.get("message", "")).lower() for word in _OUR_OWN_LIMIT
    )


def _refuse_lost(pod: Mapping[str, Any], status: Mapping[str, Any], name: str) -> None:
    disruption = next(iter(_conditions(status, "DisruptionTarget", "True")), None)
    if disruption is not None:
        raise failure("CR0335", f"the pod was taken away: {_said(disruption)}.", name)
    phase, reason = status.get("phase"), str(status.get("reason") or "")
    if phase == "Failed":
        ends = {
            "Evicted": "was evicted",
            "DeadlineExceeded": "lived longer than it may",
            "Preempting": "was preempted",
        }
        raise failure("CR0335", f"the pod {ends.get(reason, 'has failed')}: {_said(status)}.", name)
    if phase == "Succeeded":
        raise failure("CR0335", "the pod ended by itself.", name)
    if phase == "Unknown" or reason == "NodeLost":
        raise failure("CR0335", f"the pod's node does not answer: {_said(status)}.", name)
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        raise failure("CR0335", "somebody deleted the pod.", name)


def _why(status: Mapping[str, Any], task: Mapping[str, Any], stage: Mapping[str, Any]) -> str:
    for condition in _conditions(status, "PodScheduled", "False"):
        return _said(condition)
    for container in (stage, task):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return _said(waiting)
    return str(status.get("phase") or "nothing is known of it")


def _statuses(status: Mapping[str, Any], key: str, name: str) -> Iterator[dict[str, Any]]:
    yield from (entry for entry in status.get(key) or [] if entry.get("name") == name)


def _conditions(status: Mapping[str, Any], kind: str, value: str) -> Iterator[dict[str, Any]]:
    for entry in status.get("conditions") or []:
        if entry.get("type") == kind and entry.get("status") == value:
            yield entry


def _said(entry: Mapping[str, Any]) -> str:
    words = [str(entry[key]) for key in ("reason", "message") if entry.get(key)]
    if not words and "exitCode" in entry:
        words = [f"exit code {entry['exitCode']}"]
    return " ".join(": ".join(words).split())[:400].rstrip(".") or "no reason given"
