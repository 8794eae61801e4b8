"""The pod and the network policy, as the API server takes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.records import Limits
from composer_replication.sandbox.pods.pod_plan import PodPlan
from composer_replication.sandbox.pods.pod_scripts import FIRST_PROCESS, STAGE_WAIT
from composer_replication.sandbox.pods.pod_state import STAGE, TASK

LABEL = "composer-rl/sandbox"
OWNER_LABEL = "composer-rl/owner"
POLICY_NAME = "composer-rl-sandbox-no-network"
STAGE_FOLDER = "/composer-stage"
_MIB = 1 << 20
_SLACK_BYTES = 64 * _MIB
_LEAST_MEMORY_BYTES = 64 * _MIB


def _claims_from(text: str) -> tuple[tuple[Path, str], ...]:
    """``PATH=CLAIM`` words; see ``PodSettings.claims``."""
    pairs = (word.partition("=") for word in text.split())
    return tuple((Path(path), claim) for path, _, claim in pairs if path and claim)


def _variable(name: str, default: str) -> Any:
    return field(default_factory=lambda: os.environ.get(f"COMPOSER_RL_POD_{name}", default))


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What a cluster wants; a subclass of the backend, named by dotted path, brings its own.

    Args:
        image: with programs, ``sh``, ``tar`` (GNU for files with holes), ``find``, ``head``, ``du`` and the very interpreter of this process at the
            same path: best the image that this process runs in.
        namespace: empty for the one that the credentials name.
        runtime_class: ``gvisor`` by default; ``none`` for the cluster's own, which shares the node's kernel.
        start_seconds: how long a pod may take from its creation until commands run.
        ttl_seconds: the cluster ends the pod after so long, whatever became of us.
        cpu_request, cpu_limit: Kubernetes quantities.
        claims: host path and persistent volume claim with the same files, for large read-only folders: mounted
            in the place of being sent. In the variable: ``PATH=CLAIM PATH=CLAIM``.
    """

    image: str = _variable("IMAGE", "")
    namespace: str = _variable("NAMESPACE", "")
    runtime_class: str = _variable("RUNTIME_CLASS", "gvisor")
    start_seconds: float = 180.0
    ttl_seconds: int = 6 * 3600
    cpu_request: str = _variable("CPU_REQUEST", "250m")
    cpu_limit: str = _variable("CPU_LIMIT", "2")
    claims: tuple[tuple[Path, str], ...] = field(
        default_factory=lambda: _claims_from(os.environ.get("COMPOSER_RL_POD_CLAIMS", ""))
    )


def pod_manifest(
    name: str,
    plan: PodPlan,
    settings: PodSettings,
    limits: Limits,
    *,
    uid: int,
    owner: str,
    num_stage_bytes: int,
    tree_bytes: int,
    owner_pod: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A pod without rights: no token, no capabilities, no writable root, no root user, no network names.

    Args:
        name: of the pod.
        plan: what it shows.
        settings: of the cluster.
        limits: ``num_processes`` and ``num_open_files`` are set inside, by the shell that starts a command.
        uid: user and group inside.
        owner: this process, as a label.
        num_stage_bytes: what will be sent into ``shown``.
        tree_bytes: what the tree holds at the start; ``disk_bytes`` come on top.
        owner_pod: name and uid of our own pod, with which this one dies.
    """
    metadata: dict[str, Any] = {"name": name, "labels": {LABEL: "true", OWNER_LABEL: owner}}
    if owner_pod:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", **owner_pod}]
    disk_bytes = tree_bytes + limits.disk_bytes + _SLACK_BYTES
    spec: dict[str, Any] = {
        "restartPolicy": "Always",  # a container that is out of memory comes back, and its tree with it
        "activeDeadlineSeconds": settings.ttl_seconds,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": uid,
            "runAsGroup": uid,
            "fsGroup": uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [
            _container(
                STAGE,
                settings,
                limits,
                script=STAGE_WAIT,
                mounts=[{"name": "shown", "mountPath": STAGE_FOLDER}],
            )
        ],
        "containers": [
            _container(
                TASK, settings, limits, script=FIRST_PROCESS, mounts=plan.mounts(), disk_bytes=disk_bytes
            )
        ],
        "volumes": _volumes(plan, num_stage_bytes, disk_bytes),
    }
    if settings.runtime_class != "none":
        spec["runtimeClassName"] = settings.runtime_class
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _container(
    name: str,
    settings: PodSettings,
    limits: Limits,
    *,
    script: str,
    mounts: list[dict[str, Any]],
    disk_bytes: int = _SLACK_BYTES,
) -> dict[str, Any]:
    memory = max(limits.memory_bytes, _LEAST_MEMORY_BYTES)
    return {
        "name": name,
        "image": settings.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/sh", "-c", script],
        "volumeMounts": mounts,
        "resources": {
            "requests": {"cpu": settings.cpu_request, "memory": str(_LEAST_MEMORY_BYTES)},
            "limits": {
                "cpu": settings.cpu_limit,
                "memory": str(memory),
                "ephemeral-storage": str(2 * disk_bytes),
            },
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _volumes(plan: PodPlan, num_stage_bytes: int, disk_bytes: int) -> list[dict[str, Any]]:
    sizes = {name: disk_bytes for name, _ in plan.writable()}
    sizes["shown"] = 2 * num_stage_bytes + _SLACK_BYTES
    sizes["nothing"] = _MIB
    found: list[dict[str, Any]] = [
        {"name": name, "emptyDir": {"sizeLimit": str(size)}} for name, size in sizes.items()
    ]
    for number, (_, claim) in enumerate(plan.claims):
        if any(shown.volume == f"claim-{number}" for shown in plan.shown):
            source = {"claimName": claim, "readOnly": True}
            found.append({"name": f"claim-{number}", "persistentVolumeClaim": source})
    return found


def network_policy() -> dict[str, Any]:
    """Nothing in, nothing out, for every pod of ours in the namespace."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY_NAME},
        "spec": {"podSelector": {"matchLabels": {LABEL: "true"}}, "policyTypes": ["Ingress", "Egress"]},
    }


def difference_to_closed(policy: Mapping[str, Any]) -> str:
    """Empty, or in what a policy of the cluster is not ours; an API server leaves empty lists out, or writes them."""
    spec = policy.get("spec")
    if not isinstance(spec, Mapping):
        return "it has no spec"
    for rules in ("ingress", "egress"):
        if spec.get(rules):
            return f"it has {rules} rules"
    types = spec.get("policyTypes")
    if not isinstance(types, list) or not {"Ingress", "Egress"} <= {str(kind) for kind in types}:
        return f"its policyTypes are {types}"
    selector = spec.get("podSelector")
    narrowed = (
        {key: value for key, value in selector.items() if value} if isinstance(selector, Mapping) else None
    )
    if narrowed not in ({}, network_policy()["spec"]["podSelector"]):  # an empty one is for every pod
        return f"its podSelector is {selector}"
    unknown = sorted(set(spec) - {"podSelector", "policyTypes", "ingress", "egress"})
    return f"it has {', '.join(unknown)}" if unknown else ""
