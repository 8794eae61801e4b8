"""Status, logs and stop of jobs in Kubernetes: the real kubectl against kmock, a server that keeps objects and runs nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kmock
import pytest

from composer_replication.errors import UsageError
from composer_replication.launch.job import Job, recipe_files
from composer_replication.launch.targets import Target, open_target

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"
PLACES = {
    "job": ("kubernetes", "batch/v1/jobs", "Job"),
    "jobset": ("kubernetes", "jobset.x-k8s.io/v1alpha2/jobsets", "JobSet"),
    "rayjob": ("kuberay", "ray.io/v1/rayjobs", "RayJob"),
}
PODS = "/api/v1/namespaces/runs/pods"
EVENTS = "/api/v1/namespaces/runs/events"
TAKEN_BY_THE_HALT = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}


@pytest.fixture
def server() -> Iterator[kmock.KubernetesEmulator]:
    """The server in a thread of its own; it knows the three kinds of jobs, and pods."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    emulator = kmock.KubernetesEmulator()
    http = kmock.Server(emulator)

    def done(step: Any) -> None:
        asyncio.run_coroutine_threadsafe(step, loop).result(30)

    for _, resource, kind in PLACES.values():
        emulator.resources[resource] = {"kind": kind, "namespaced": True, "verbs": {"get", "patch"}}
    pods = {
        "name": "pods",
        "singularName": "pod",
        "kind": "Pod",
        "namespaced": True,
        "verbs": ["get", "list"],
    }
    events = {**pods, "name": "events", "singularName": "event", "kind": "Event"}
    emulator["get /api/v1"] << {"kind": "APIResourceList", "groupVersion": "v1", "resources": [pods, events]}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "runs"}}
    emulator["get /api/v1/namespaces/runs"] << space
    done(emulator.__aenter__())
    done(http.__aenter__())
    yield emulator
    done(http.__aexit__(None, None, None))
    done(emulator.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def opened(server: kmock.KubernetesEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens a target whose kubectl speaks with the server."""
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "k",
        "clusters": [{"name": "k", "cluster": {"server": str(server.url)}}],
        "contexts": [{"name": "k", "context": {"cluster": "k", "user": "k"}}], "users": [{"name": "k", "user": {}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl keeps there what it has found out about a server
    return lambda name: open_target(name, {"image": "i", "namespace": "runs"}, tmp_path)


def put(server: kmock.KubernetesEmulator, kind: str, status: dict[str, Any], **spec: Any) -> None:
    _, resource, name = PLACES[kind]
    kept = {
        "apiVersion": resource.rpartition("/")[0],
        "kind": name,
        "metadata": {"name": "run", "namespace": "runs"},
    }
    server.objects[resource, "runs", "run"] = {**kept, "spec": spec, "status": status}


def put_pods(server: kmock.KubernetesEmulator, *states: dict[str, Any]) -> None:
    """kmock gives lists no kind, which kubectl wants: this one is given whole."""
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "trainer"}]},
         "metadata": {"name": f"run-{i}-x", "namespace": "runs", "labels": {"composer-rl/job": "run"}},
         "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": state}]}}
        for i, state in enumerate(states)
    ]  # fmt: skip
    server[f"get {PODS}"] << {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": pods}


def put_warnings(server: kmock.KubernetesEmulator, *warnings: tuple[str, str, str, int]) -> None:
    """Of what, the reason, the message, the minute."""
    items = [
        {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"w{i}", "namespace": "runs"}, "type": "Warning",
         "involvedObject": {"name": name}, "reason": reason, "message": said,
         "lastTimestamp": f"2026-01-01T00:{minute:02}:00Z"}
        for i, (name, reason, said, minute) in enumerate(warnings)
    ]  # fmt: skip
    server[f"get {EVENTS}"] << {"apiVersion": "v1", "kind": "EventList", "metadata": {}, "items": items}


@pytest.mark.parametrize(
    ("kind", "status", "spec", "pod", "state"),
    [
        ("job", {}, {}, None, "waiting"),
        ("job", {"active": 2, "ready": 2}, {}, None, "running"),
        ("job", {"active": 2, "ready": 0}, {}, None, "waiting"),
        ("job", {"active": 2}, {"suspend": True}, None, "stopped"),
        ("job", {"conditions": [{"type": "Complete", "status": "True"}]}, {}, 0, "succeeded"),
        ("job", {"conditions": [{**TAKEN_BY_THE_HALT, "message": "failed with exit code 5 matching FailJob"}]}, {}, None, "halted"),
        ("job", {"conditions": [{**TAKEN_BY_THE_HALT, "message": "failed with exit code 51"}]}, {}, 1, "failed"),
        ("jobset", {"replicatedJobsStatus": [{"name": "replica", "ready": 1}]}, {}, None, "running"),
        ("jobset", {"replicatedJobsStatus": [{"name": "replica", "active": 1, "ready": 0}]}, {}, None, "waiting"),
        ("jobset", {"conditions": [TAKEN_BY_THE_HALT]}, {}, 5, "halted"),
        ("jobset", {"conditions": [TAKEN_BY_THE_HALT]}, {}, 1, "failed"),
        ("jobset", {"conditions": [{"type": "Completed", "status": "True"}]}, {}, 0, "succeeded"),
        ("rayjob", {"jobStatus": "RUNNING"}, {}, None, "running"),
        ("rayjob", {"jobStatus": "FAILED", "message": "command failed with exit code 5"}, {}, None, "halted"),
        ("rayjob", {"jobStatus": "FAILED", "message": "command failed with exit code 1"}, {}, None, "failed"),
        ("rayjob", {"jobStatus": "SUCCEEDED"}, {}, None, "succeeded"),
        ("rayjob", {"jobDeploymentStatus": "Suspended"}, {}, None, "stopped"),
    ],
)  # fmt: skip
def test_status(
    server: kmock.KubernetesEmulator, opened: Any, kind: str, status: dict[str, Any], spec: dict[str, Any],
    pod: int | None, state: str,
) -> None:  # fmt: skip
    put(server, kind, status, **spec)
    put_pods(server, {"running": {}} if pod is None else {"terminated": {"exitCode": pod}})
    put_warnings(server)
    answer = opened(PLACES[kind][0]).status(f"{kind}/run")
    assert answer.state == state
    assert answer.exit_code == {"halted": 5, "succeeded": 0}.get(state)


@pytest.mark.parametrize(
    ("kind", "of_what"),
    [
        ("job", "run-1-abcde"), ("job", "run"), ("jobset", "run-replica-3-0-abcde"), ("jobset", "run-replica-0"),
        ("rayjob", "run-abcde-head-fghij"), ("rayjob", "run-abcde-rollouts-worker-fghij"), ("rayjob", "run-abcde"),
    ],
)  # fmt: skip
def test_what_keeps_a_job_from_starting_is_said(
    server: kmock.KubernetesEmulator, opened: Any, kind: str, of_what: str
) -> None:
    put(server, kind, {"active": 1})
    put_warnings(
        server,
        ("run-2-0-abcde", "Failed", "an image of another job", 9),
        (of_what, "Failed", 'Failed to pull image "i": not found', 5),
        (of_what, "FailedScheduling", "0/3 nodes are available", 1),
    )
    answer = opened(PLACES[kind][0]).status(f"{kind}/run")
    assert (answer.state, answer.detail) == ("waiting", 'Failed: Failed to pull image "i": not found')
    assert [one.params.get("fieldSelector") for one in server[f"get {EVENTS}"]] == ["type=Warning"]


@pytest.mark.parametrize("kind", PLACES)
def test_logs_and_stop(server: kmock.KubernetesEmulator, opened: Any, kind: str) -> None:
    put(server, kind, {"active": 1})
    put_pods(server, {"running": {}}, {"running": {}})
    for i in range(2):
        server[f"get {PODS}/run-{i}-x/log"] << f"step {i}\n".encode()
    target: Target = opened(PLACES[kind][0])
    said = target.logs(f"{kind}/run")
    assert sorted(line.partition("] ")[2] for line in said.splitlines()) == ["step 0", "step 1"]
    asked = [request.params.get("labelSelector") for request in server[f"get {PODS}"]]
    assert asked == ["composer-rl/job=run"]
    target.stop(f"{kind}/run")
    assert server.objects[PLACES[kind][1], "runs", "run"].raw["spec"]["suspend"] is True


@pytest.mark.parametrize("kind", PLACES)
def test_a_job_that_is_there_already_is_not_said_to_be_submitted(
    opened: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the real kubectl says of an object that is there as it is: a server that keeps all of a manifest is not here."""
    target: Target = opened(PLACES[kind][0])
    said = {"job": "job.batch", "jobset": "jobset.jobset.x-k8s.io", "rayjob": "rayjob.ray.io"}[kind]
    asked = []

    def answer(*words: str) -> str:
        asked.append(words[:2])
        return f"configmap/run-recipe unchanged (server dry run)\n{said}/run unchanged (server dry run)\n"

    monkeypatch.setattr(target, "_kubectl", answer)
    replicas = 2 if kind == "jobset" else 1
    job = Job("run", RECIPE, recipe_files(RECIPE), replicas=replicas)
    with pytest.raises(UsageError, match="is there: delete it") as caught:
        target.submit(job)
    assert (caught.value.code, asked) == ("CR0932", [("apply", "--dry-run=server")])


def test_what_is_not_there_is_one_sentence(
    server: kmock.KubernetesEmulator, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"CR0932.*object is not found"):
        opened("kubernetes").status("job/run")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with pytest.raises(UsageError, match="refused"):
        opened("kubernetes").stop("job/run")
