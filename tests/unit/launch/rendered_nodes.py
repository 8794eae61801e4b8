"""What each target would start, parsed from what was rendered for it: one process a node, with its files and variables.

Nothing is taken from the code that renders: paths, names of hosts and ranks are given here as the
scheduler gives them, below one folder instead of ``/``.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

OF_THE_SHELL = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/root")}


@dataclass
class NodeProcess:
    """The command of one node, ready to be run here."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = Path("/")

    def start(self, further: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command,
            cwd=self.folder,
            env={**OF_THE_SHELL, **self.environment, **further},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


class BrokenRenderingError(AssertionError):
    """What a scheduler would have refused, or what would have died at the start."""


def of_local(script: str, root: Path) -> list[NodeProcess]:
    (root / "run.sh").write_text(script)
    return [NodeProcess(["/bin/bash", "run.sh"], folder=root)]


def of_slurm(script: str, root: Path, nodes: int, replica: int | None) -> list[NodeProcess]:
    """The batch script as it is; ``srun`` and ``scontrol`` are stand-ins that do what Slurm's do for two nodes."""
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", script, re.MULTILINE))
    if int(asked["nodes"]) != nodes or asked["ntasks-per-node"] != "1":
        raise BrokenRenderingError(f"one task on each of {nodes} nodes was asked for, not {asked}")
    if asked.get("array", "0-0") != ("0-0" if replica is None else "0-1"):
        raise BrokenRenderingError(f"an array of two replicas was asked for, or none, not {asked['array']}")
    programs = root / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text(
        '#!/bin/bash\nif [ "$2 $3" = "hostnames $SLURM_JOB_NODELIST" ]; then printf "n0\\nn1\\n"\n'
        'elif [ "$2 $3 $4" = "node -o n0" ]; then echo "NodeName=n0 Arch=x NodeAddr=127.0.0.1 Port=1"; fi\n'
    )
    (programs / "srun").write_text(
        "#!/bin/bash\nshift\npids=()\n"
        f'for i in $(seq 0 {nodes - 1}); do SLURM_NODEID=$i "$@" & pids+=($!); done\n'
        'code=0; for pid in "${pids[@]}"; do wait $pid || code=$?; done; exit $code\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    (root / "job.sbatch").write_text(script)
    given = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n[0-1]"}
    given |= {} if replica is None else {"SLURM_ARRAY_TASK_ID": str(replica)}
    path = f"{programs}:{OF_THE_SHELL['PATH']}"
    return [NodeProcess(["/bin/bash", "job.sbatch"], {**given, "PATH": path}, root)]


def of_pods(text: str, root: Path, replica: int | None) -> list[NodeProcess]:
    """The pods of the Job or of one Job of the JobSet, as the controllers and the kubelet make them."""
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    main = objects.get("JobSet") or objects["Job"]
    name, spec = main["metadata"]["name"], main["spec"]
    prefix, labels = name, {}
    if main["kind"] == "JobSet":
        template = spec["replicatedJobs"][0]
        subdomain = spec["network"]["subdomain"]
        prefix, spec = f"{name}-{template['name']}-{replica}", template["template"]["spec"]
        labels["jobset.sigs.k8s.io/job-index"] = str(replica)
    else:
        subdomain = spec["template"]["spec"]["subdomain"]
        if (
            objects["Service"]["metadata"]["name"] != subdomain
            or objects["Service"]["spec"]["clusterIP"] != "None"
        ):
            raise BrokenRenderingError("no headless service gives the pods their names")
    pods = range(spec["completions"])
    hosts = {f"{prefix}-{i}.{subdomain}": "127.0.0.1" for i in pods}
    return [_pod(spec["template"], objects, labels, i, hosts, root / f"pod-{i}", root) for i in pods]


def of_rayjob(text: str, root: Path) -> list[NodeProcess]:
    """The entrypoint, which Ray's job server runs in the head's pod."""
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    spec = objects["RayJob"]["spec"]
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]
    head["spec"]["containers"][0]["command"] = shlex.split(spec["entrypoint"])
    return [_pod(head, objects, {}, None, {}, root / "pod-0", root)]


def _pod(
    template: dict[str, Any], objects: dict[str, Any], labels: dict[str, str], index: int | None,
    hosts: dict[str, str], own: Path, shared: Path,
) -> NodeProcess:  # fmt: skip
    container = template["spec"]["containers"][0]
    volumes = {one["name"]: one for one in template["spec"]["volumes"]}
    places: dict[str, str] = {}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            places[mount["mountPath"]] = str(
                _config_map(volume["configMap"], objects["ConfigMap"], own / mount["name"])
            )
        elif "persistentVolumeClaim" in volume:
            claim = objects.get("PersistentVolumeClaim")
            if claim is None or claim["metadata"]["name"] != volume["persistentVolumeClaim"]["claimName"]:
                raise BrokenRenderingError(
                    f"there is no claim {volume['persistentVolumeClaim']['claimName']}"
                )
            places[mount["mountPath"]] = str(shared / "claim")
    all_labels = {**template["metadata"]["labels"], **labels}
    variables = {} if index is None else {"JOB_COMPLETION_INDEX": str(index)}
    for one in container["env"]:
        if "value" in one:
            variables[one["name"]] = one["value"]
        elif "fieldRef" in one["valueFrom"]:
            path = re.fullmatch(r"metadata\.labels\['(.*)'\]", one["valueFrom"]["fieldRef"]["fieldPath"])
            variables[one["name"]] = all_labels[path[1]] if path and path[1] in all_labels else ""
    command = [_given(word, variables) for word in container["command"]]
    return NodeProcess(
        [_placed(word, places, hosts) for word in command],
        {name: _placed(value, places, {}) for name, value in variables.items()},
        own,
    )


def _config_map(volume: dict[str, Any], config_map: dict[str, Any], folder: Path) -> Path:
    """As the kubelet lays it out: each name at the top is a link into ``..data``, which is a link itself."""
    if volume["name"] != config_map["metadata"]["name"]:
        raise BrokenRenderingError(f"there is no ConfigMap {volume['name']}")
    data = folder / "..2026"
    for item in volume["items"]:
        path = data / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(config_map["binaryData"][item["key"]]))
    (folder / "..data").symlink_to(data.name)
    for top in data.iterdir():
        (folder / top.name).symlink_to(Path("..data") / top.name)
    return folder


def of_sagemaker(text: str, root: Path) -> list[NodeProcess]:
    """The containers of a training job, with the file that SageMaker puts into each."""
    request = json.loads(text)
    # in place of algo-1 and so on, which nothing here finds
    hosts = [f"127.0.0.{i + 1}" for i in range(request["ResourceConfig"]["InstanceCount"])]
    algorithm = request["AlgorithmSpecification"]
    channel = request["InputDataConfig"][0]["ChannelName"]
    found = []
    for host in hosts:
        place = root / host / "resourceconfig.json"
        place.parent.mkdir()
        place.write_text(json.dumps({"current_host": host, "hosts": list(reversed(hosts))}))
        places = {
            "/opt/ml/input/config/resourceconfig.json": str(place),
            f"/opt/ml/input/data/{channel}": str(root / "recipe"),
            request["CheckpointConfig"]["LocalPath"]: str(root / "checkpoints"),
        }
        words = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
        command = [_placed(word, places, {}) for word in words]
        found.append(NodeProcess(command, request["Environment"], root / host))
    return found


def of_skypilot(text: str, root: Path) -> list[NodeProcess]:
    """The shell line of a task on each node."""
    task = yaml.safe_load(text)
    recipe, run = task["file_mounts"]
    places = {recipe: str(root / "recipe"), run: str(root / "bucket")}
    addresses = "\n".join(["127.0.0.1", *["10.0.0.9"] * (task["num_nodes"] - 1)])
    line = _placed(task["run"], places, {}, in_text=True)
    return [
        NodeProcess(
            ["/bin/bash", "-c", line],
            {**task.get("envs", {}), "SKYPILOT_NODE_RANK": str(i), "SKYPILOT_NODE_IPS": addresses},
            root,
        )
        for i in range(task["num_nodes"])
    ]


def of_ray(text: str, root: Path) -> list[NodeProcess]:
    """The entrypoint in the working directory that travels with the job, with its variables."""
    request = json.loads(text)
    return [NodeProcess(["/bin/bash", "-c", request["entrypoint"]], request["runtime_env"]["env_vars"], root)]


def _given(word: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` as the kubelet fills it in; a name that nothing gives would stay as it is."""
    for name in re.findall(r"\$\((\w+)\)", word):
        if name not in variables:
            raise BrokenRenderingError(f"nothing gives the variable {name}")
        word = word.replace(f"$({name})", variables[name])
    return word


def _placed(word: str, places: Mapping[str, str], hosts: Mapping[str, str], *, in_text: bool = False) -> str:
    """A word with the folders and hosts of this machine; a path or host that nothing provides is an error."""
    for path, place in sorted(places.items(), key=lambda pair: -len(pair[0])):
        if in_text or word == path or word.startswith(f"{path}/"):
            word = word.replace(path, place)
            if not in_text:
                return word
    if not in_text and (word.startswith("/") or "=/" in word):
        raise BrokenRenderingError(f"nothing is mounted at {word}")
    if hosts and re.search(r"-\d+\.[a-z]", word):
        if word not in hosts:
            raise BrokenRenderingError(f"no pod has the name {word}")
        return hosts[word]
    return sys.executable if word == "python" else word
