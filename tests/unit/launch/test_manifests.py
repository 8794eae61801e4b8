"""The manifests of Kubernetes, EKS and KubeRay against the schemas of what they are, and against each other."""

from __future__ import annotations

import functools
import gzip
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from composer_replication.launch.job import Job, Resources, recipe_files
from composer_replication.launch.targets import open_target

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"
SCHEMAS = Path(__file__).parents[2] / "data" / "schemas"
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
ENUMS = {
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "completionMode": {"Indexed", "NonIndexed"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "submissionMode": {"K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"},
    "procMount": {"Default", "Unmasked"},
}
"""Fields whose lists of values the schemas leave out."""


def closed(schema: Any) -> Any:
    """The schema without unknown fields, and with numbers or text where Kubernetes takes both."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if found.get("type") == "object" and isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", bool(found.get("x-kubernetes-preserve-unknown-fields")))
    return found


@functools.cache
def schema_of(kind: str, api_version: str) -> Any:
    """Of a kind of Kubernetes, or of a custom resource, whose metadata is the server's."""
    if kind not in ("JobSet", "RayJob"):
        known = json.loads(gzip.decompress((SCHEMAS / "kubernetes.json.gz").read_bytes()))
        return {**known["kinds"][kind], "definitions": known["definitions"]}
    data = json.loads(gzip.decompress((SCHEMAS / f"{kind.lower()}.json.gz").read_bytes()))
    group, _, version = api_version.partition("/")
    assert group == data["group"]
    schema = closed(data["versions"][version])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def every(value: Any, key: str) -> list[Any]:
    """All values of a key, however deep."""
    if isinstance(value, list):
        return [found for one in value for found in every(one, key)]
    if not isinstance(value, dict):
        return []
    return [
        *([value[key]] if key in value else []),
        *(found for one in value.values() for found in every(one, key)),
    ]


def problems(text: str) -> list[str]:
    """What a server, a controller or a kubelet would not take."""
    documents = list(yaml.safe_load_all(text))
    found = []
    for one in documents:
        errors = jsonschema.Draft4Validator(schema_of(one["kind"], one["apiVersion"])).iter_errors(one)
        found += [f"{one['kind']} {'/'.join(map(str, error.path))}: {error.message}" for error in errors]
        values = {key: every(one, key) for key in ENUMS}
        found += [
            f"{key} {value}" for key, known in ENUMS.items() for value in values[key] if value not in known
        ]
        quantities = [
            value for table in every(one, "requests") + every(one, "limits") for value in table.values()
        ]
        found += [f"quantity {value}" for value in quantities if not QUANTITY.fullmatch(str(value))]
        if not DNS_LABEL.fullmatch(one["metadata"]["name"]):
            found.append(f"name {one['metadata']['name']}")
    return found + loose_ends({one["kind"]: one for one in documents})


def loose_ends(objects: dict[str, Any]) -> list[str]:
    """Names in one object that no other has."""
    found = []
    main = next(objects[kind] for kind in ("JobSet", "RayJob", "Job") if kind in objects)
    templates = [one for one in every(main, "template") if "containers" in one.get("spec", {})]
    templates += every(main, "submitterPodTemplate")
    labels = [one["metadata"]["labels"] for one in templates]
    for kind, selector in (
        ("Service", objects.get("Service", {}).get("spec", {}).get("selector", {})),
        ("PodDisruptionBudget", objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]),
        ("NetworkPolicy", objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]),
        ("ingress", every(objects["NetworkPolicy"], "from")[0][0]["podSelector"]["matchLabels"]),
    ):
        if not all(selector.items() <= one.items() for one in labels):
            found.append(f"{kind} selects no pod")
    if type(objects["PodDisruptionBudget"]["spec"].get("minAvailable")) is not int:
        found.append("a budget that no controller can count")
    for pod in (one["spec"] for one in templates):
        names = {one["name"] for one in pod["containers"]}
        found += [f"no container {name}" for name in every(main, "containerName") if name not in names]
        volumes = {one["name"]: one for one in pod.get("volumes", [])}
        mounted = {one["name"] for mounts in every(pod, "volumeMounts") for one in mounts}
        found += [f"volume {name}" for name in mounted ^ volumes.keys()]
        for items in every(pod, "items"):
            if {one["key"] for one in items} != objects["ConfigMap"]["binaryData"].keys():
                found.append("keys of the recipe")
        if volumes and pod["securityContext"] != {"fsGroup": 1000}:
            found.append("the images' user may not write what is mounted")
        account = pod.get("serviceAccountName")
        if "ServiceAccount" in objects and objects["ServiceAccount"]["metadata"]["name"] != account:
            found.append(f"no service account {account}")
        for one in pod["containers"]:
            if one["resources"]["requests"] != one["resources"]["limits"]:
                found.append("a pod that may be taken more than it asked for is killed first")
    return found


def manifests(target: str, *, replicas: int = 1, gpus: int = 0, **options: Any) -> str:
    place = {"cluster": "c", "region": "us-east-1"} if target == "eks" else {}
    resources = Resources(nodes=1 if target == "kuberay" else 2, gpus=gpus, processes=max(1, gpus))
    job = Job("run", RECIPE, recipe_files(RECIPE), (), resources, replicas, {"A": "1"}, ("HF_TOKEN",))
    opened = open_target(
        target, {"image": "registry.example/trainer:1", **place, **options}, Path("jobs/run")
    )
    return opened.render(job)["manifests.yaml"]


ROLE = "arn:aws:iam::123456789012:role/trainer"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "job": ("kubernetes", {}),
    "job-all": (
        "kubernetes",
        {"gpus": 8, "claim": "shared", "service_account": "a", "secret": "s", "priority_class": "high",
         "tolerates": "spot=true:NoSchedule,gpu:NoExecute", "node_selector": "a=b,c=d", "user_namespaces": True},
    ),
    "jobset": ("kubernetes", {"replicas": 4, "storage_class": "nfs"}),
    "eks": ("eks", {"replicas": 2, "gpus": 8, "efa": 4, "spot": True, "instance_type": "p5.48xlarge", "role": ROLE}),
    "eks-irsa": ("eks", {"role": ROLE, "role_by": "irsa"}),
    "kuberay": ("kuberay", {"gpus": 1, "rollout_workers": 3}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_object_fits_its_schema_and_the_others(case: str) -> None:
    target, options = CASES[case]
    assert problems(manifests(target, **options)) == []


def test_what_was_asked_for_is_there() -> None:
    objects = {one["kind"]: one for one in yaml.safe_load_all(manifests("eks", **CASES["eks"][1]))}
    limits = every(objects["JobSet"], "limits")[0]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == ("8", "4")
    selector = {"karpenter.sh/capacity-type": "spot", "node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert every(objects["JobSet"], "nodeSelector") == [selector]
    assert every(objects["JobSet"], "secretKeyRef") == [{"name": "run", "key": "HF_TOKEN"}]
    irsa = {one["kind"]: one for one in yaml.safe_load_all(manifests("eks", **CASES["eks-irsa"][1]))}
    annotations = irsa["ServiceAccount"]["metadata"]["annotations"]
    assert annotations == {"eks.amazonaws.com/role-arn": ROLE}


@pytest.mark.parametrize("case", ["job", "jobset"])
def test_a_halt_is_final_and_a_lost_node_is_not(case: str) -> None:
    """The rules in the order in which the controller reads them: the first that fits decides."""
    main = list(yaml.safe_load_all(manifests(CASES[case][0], **CASES[case][1])))[-1]
    rules = every(main, "podFailurePolicy")[0]["rules"]

    def decided(exit_code: int, *, is_disrupted: bool = False) -> str:
        for rule in rules:
            codes = rule.get("onExitCodes", {}).get("values", [])
            if exit_code in codes or (is_disrupted and "onPodConditions" in rule):
                return str(rule["action"])
        return "Count"

    assert decided(5) == decided(5, is_disrupted=True) == "FailJob"
    assert decided(130) == decided(137, is_disrupted=True) == "Ignore"
    assert decided(1) == "Count"
    assert every(main, "restartPolicy") == ["Never"]  # else the kubelet restarts a halted container by itself
    if case == "jobset":
        first, second = main["spec"]["failurePolicy"]["rules"]
        assert (first["action"], first["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
        assert second["action"] == "RestartJob"  # its replica alone


def test_a_cluster_of_ray_repeats_no_run_and_its_driver_is_heard() -> None:
    objects = {one["kind"]: one for one in yaml.safe_load_all(manifests("kuberay", worker_image="worker:1"))}
    spec, labels = objects["RayJob"]["spec"], objects["RayJob"]["metadata"]["labels"]
    assert spec["backoffLimit"] == 0
    assert spec["submitterPodTemplate"]["metadata"]["labels"] == labels
    assert "command" not in spec["submitterPodTemplate"]["spec"]["containers"][0]
    operator = every(objects["NetworkPolicy"], "from")[0][1]  # it asks the head how the run stands
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert [one["image"] for one in workers] == ["worker:1"]
    assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}


PLANTED = """
job      restartPolicy: Never -> restartPolicy: Sometimes            restartPolicy Sometimes
job      backoffLimit: 16 -> backoffLimit: "16"                      is not of type
job      containerName: trainer -> containerName: trainers           no container trainers
job      selector: {"composer-rl/job": "run"} -> selector: {"a": "b"}  Service selects no pod
job      minAvailable: 1 -> maxUnavailable: 1  no controller can count
job      - {name: data, mountPath -> - {name: date, mountPath        volume
job      podSelector: {matchLabels: {"composer-rl/job": "run"}} -> podSelector: {matchLabels: {"a": "b"}}  NetworkPolicy selects no pod
job      metadata: {name: "run" -> metadata: {name: "Run_1"          name Run_1
jobset   action: FailJobSet -> action: StopJobSet                    is not one of
jobset   replicas: 4 -> replicas: "4"                                is not of type
eks      serviceAccountName: "composer-rl" -> serviceAccountName: "other"  no service account other
kuberay  rayClusterSpec: -> rayCluster:                              rayCluster
kuberay  groupName: rollouts -> group: rollouts                      group
"""
"""What is rendered for which case, the error instead, and what is said of it."""


@pytest.mark.parametrize("line", PLANTED.strip().splitlines())
def test_a_planted_error_is_found(line: str) -> None:
    case, change, said = re.split(" {2,}", line)
    old, new = change.split(" -> ")
    text = manifests(CASES[case][0], **CASES[case][1])
    assert old in text
    assert any(said in one for one in problems(text.replace(old, new)))
