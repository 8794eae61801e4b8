"""What goes wrong between us and a cluster is a failure with one sentence, or an honest result."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_http import Fault, cut_the_answer, hang_up, no_http, no_json, status

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import base_python, run_selftest
from composer_replication.sandbox.pods import kubernetes_backend, pod_exec, pod_manifest
from composer_replication.sandbox.pods.api_client import ApiClient, ApiRefusal
from composer_replication.sandbox.pods.cluster_access import find_access
from composer_replication.sandbox.pods.kubernetes_backend import Kubernetes
from composer_replication.sandbox.pods.pod_manifest import PodSettings

LONG = 60.0


def code_of(act: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises((SandboxFailure, MissingError)) as caught:
        act()
    return caught.value.code, str(caught.value)


def refusal(
    code: int, reason: str, message: str, headers: dict[str, str] | None = None
) -> Callable[[Any], None]:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}
    return lambda handler: handler.say(code, body, headers)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    def client(self: Kubernetes) -> ApiClient:
        return ApiClient(find_access(), patience_seconds=0.5, timeout_seconds=5.0)

    monkeypatch.setattr(Kubernetes, "_client", client)


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (Fault("POST .*/pods$", refusal(403, "Forbidden", "pods is forbidden"), 99), "CR0332", "make a pod"),
        (
            Fault("POST .*/pods$", refusal(403, "Forbidden", 'RuntimeClass "gvisor" not found'), 99),
            "CR0332",
            "gvisor",
        ),
        (
            Fault("POST .*/pods$", refusal(422, "Invalid", "spec.x: Invalid value"), 99),
            "CR0333",
            "Invalid value",
        ),
        (Fault("POST .*/pods$", refusal(409, "AlreadyExists", "taken"), 99), "CR0333", "every name"),
        (Fault("POST .*/pods$", refusal(429, "TooManyRequests", "slow down"), 99), "CR0333", "slow down"),
        (Fault("POST .*/pods$", refusal(500, "InternalError", "etcd"), 99), "CR0333", "etcd"),
        (Fault("GET .*/pods/", refusal(410, "Expired", "too old"), 99), "CR0333", "too old"),
        (Fault("GET .*/networkpolicies", refusal(401, "Unauthorized", "Unauthorized"), 99), "CR0332", "401"),
        (Fault("POST .*/networkpolicies", refusal(403, "Forbidden", "no"), 99), "CR0332", "forbid our pods"),
        (Fault("GET .*/pods", hang_up, 99), "CR0331", "cannot be asked"),
        (Fault("GET .*/pods", cut_the_answer, 99), "CR0331", "cannot be asked"),
        (Fault("GET .*/pods", no_http, 99), "CR0331", "cannot be asked"),
        (Fault("GET .*/pods", no_json, 99), "CR0331", "no object"),
        (Fault("GET .*/pods", status(503, "proxy"), 99), "CR0333", "proxy"),
    ],
)
def test_a_pod_that_cannot_be_made(cluster: Any, tree: Path, fault: Fault, code: str, said: str) -> None:
    cluster.freeze = {"phase": "Pending"}
    cluster.faults.append(fault)
    found, sentence = code_of(lambda: Kubernetes(PodSettings(start_seconds=3)).open(SandboxSpec(tree)))
    assert (found, said in sentence) == (code, True), sentence
    cluster.faults.clear()


@pytest.mark.long
@pytest.mark.parametrize(
    "act",
    [
        refusal(429, "TooManyRequests", "later", {"Retry-After": "1"}),
        refusal(500, "InternalError", "leader election"),
        refusal(503, "ServiceUnavailable", "starting"),
        refusal(410, "Expired", "compacted"),
        hang_up,
        cut_the_answer,
    ],
)
def test_what_passes_is_waited_for(cluster: Any, tree: Path, act: Callable[[Any], None]) -> None:
    cluster.faults += [Fault("GET .*/pods/[^/]*$", act, 2), Fault("POST .*/pods$", act, 1)]
    with Kubernetes().open(SandboxSpec(tree)) as sandbox:
        cluster.faults.append(Fault("GET .*/exec", refusal(503, "ServiceUnavailable", "starting"), 1))
        assert sandbox.exec(["echo", "on"], timeout_seconds=LONG).stdout == "on\n"
    assert cluster.pods == {}


def test_a_pod_that_was_made_although_the_answer_was_lost(cluster: Any, tree: Path) -> None:
    def make_and_hang_up(handler: Any) -> None:
        say, handler.say = handler.say, lambda *args, **more: None
        handler.respond()
        handler.say = say
        hang_up(handler)

    cluster.faults.append(Fault("POST .*/pods$", make_and_hang_up))
    with Kubernetes().open(SandboxSpec(tree)) as sandbox:
        assert sandbox.exec(["echo", "on"], timeout_seconds=LONG).stdout == "on\n"
        assert len(cluster.pods) == 1
    assert cluster.pods == {}


def test_credentials_that_are_refused(cluster: Any, tree: Path) -> None:
    cluster.write_kubeconfig(cluster.folder / "config", token="run-out")
    code, sentence = code_of(lambda: Kubernetes().open(SandboxSpec(tree)))
    assert (code, "401" in sentence) == ("CR0332", True)
    assert not Kubernetes().is_available().ok


def test_rights_and_image_are_asked_for_before(
    cluster: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Kubernetes().is_available().ok
    cluster.allowed = False
    check = Kubernetes().is_available()
    assert (check.ok, "create pods/exec" in check.detail) == (False, True)
    cluster.allowed = True
    for right in ("list pods", "get pods/exec", "create networkpolicies", "get networkpolicies"):
        cluster.refused = {right}
        assert Kubernetes().is_available().detail == f"the cluster does not allow us to {right}."
    cluster.refused = set()
    monkeypatch.setenv("COMPOSER_RL_POD_IMAGE", "")
    assert not Kubernetes().is_available().ok
    assert code_of(lambda: Kubernetes().open(SandboxSpec(tree)))[0] == "CR0301"


@pytest.mark.parametrize(
    ("frozen", "code", "said"),
    [
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient memory.",
                    }
                ],
            },
            "CR0334",
            "Insufficient memory",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
            "CR0335",
            "was evicted",
        ),
    ],
)
def test_a_pod_that_does_not_come(
    cluster: Any, tree: Path, frozen: dict[str, Any], code: str, said: str
) -> None:
    cluster.freeze = frozen
    found, sentence = code_of(lambda: Kubernetes(PodSettings(start_seconds=0.3)).open(SandboxSpec(tree)))
    assert (found, said in sentence) == (code, True), sentence
    assert cluster.pods == {}  # it is not left behind


def _cut_at(channel_number: int) -> Callable[[Any, Any, bytes], bool]:
    def cut(handler: Any, channel: Any, message: bytes) -> bool:
        if message[0] == channel_number and b"cut-here" in message:
            hang_up(handler)
            return True
        return False

    return cut


def test_a_connection_that_is_cut_while_a_command_runs(cluster: Any, tree: Path) -> None:
    cluster.exec_fault = _cut_at(1)
    with Kubernetes().open(SandboxSpec(tree)) as sandbox:
        code, sentence = code_of(lambda: sandbox.exec("echo cut-here; sleep 40", timeout_seconds=LONG))
        assert (code, "broke" in sentence) == ("CR0336", True)
        assert "sleep 40" not in sandbox.exec("cat /proc/[0-9]*/cmdline", timeout_seconds=LONG).stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\xc1\x01x", "no server sends"),  # a reserved bit
        (b"\x82\x81abcd1", "no server sends"),  # masked
        (b"\x8b\x00", "unknown kind"),
        (b"\x80\x01x", "in the middle"),  # a continuation of nothing
        (b"\x88\x02\x03\xf3", "1011"),  # the server gives up
        (b"\x82\x7f\xff\xff\xff\xff\xff\xff\xff\xff", "impossible length"),
    ],
)
def test_what_no_server_sends(cluster: Any, tree: Path, raw: bytes, said: str) -> None:
    def garble(handler: Any, channel: Any, message: bytes) -> bool:
        if b"garble-here" in message:
            channel.raw(raw)
            return True
        return False

    with Kubernetes().open(SandboxSpec(tree)) as sandbox:
        cluster.exec_fault = garble
        code, sentence = code_of(lambda: sandbox.exec("echo garble-here; sleep 40", timeout_seconds=LONG))
    assert (code, said in sentence) == ("CR0336", True), sentence


def test_pieces_and_pings_between_them_are_put_together(cluster: Any, tree: Path) -> None:
    whole = threading.Lock()  # output and errors come from two threads; a server sends one message at a time

    def in_pieces(handler: Any, channel: Any, message: bytes) -> bool:
        with whole:
            channel.frame(9, b"are you there")
            channel.frame(2, message[:1], is_last=False)
            channel.frame(9, b"")
            channel.frame(0, message[1:4], is_last=False)
            channel.frame(0, message[4:])
        return True

    cluster.protocols = ["v4.channel.k8s.io"]
    cluster.exec_fault = in_pieces
    with Kubernetes().open(SandboxSpec(tree)) as sandbox:
        result = sandbox.exec("cat; printf err >&2; exit 9", timeout_seconds=LONG, stdin=b"x" * 200_000)
    assert (result.exit_code, len(result.stdout), result.stderr) == (9, 200_000, "err")


def test_a_command_that_was_not_run_to_its_end(cluster: Any, tree: Path) -> None:
    def replace_status(handler: Any, channel: Any, message: bytes) -> bool:
        if message[0] == 3 and asked.is_set():
            said = {
                "status": "Failure",
                "reason": "InternalError",
                "message": "error executing command in container",
            }
            channel.send(b"\3" + json.dumps(said).encode())
            return True
        return False

    asked = threading.Event()
    cluster.exec_fault = replace_status
    with Kubernetes().open(SandboxSpec(tree)) as sandbox:
        asked.set()
        code, sentence = code_of(lambda: sandbox.exec("true", timeout_seconds=LONG))
        asked.clear()
    assert code in ("CR0336", "CR0337")
    assert "error executing" in sentence


def test_the_pod_is_deleted_while_a_command_runs(cluster: Any, tree: Path) -> None:
    sandbox = Kubernetes().open(SandboxSpec(tree))
    name = next(iter(cluster.pods))
    timer = threading.Timer(2.0, lambda: cluster.remove(name))
    timer.start()
    code, _ = code_of(lambda: sandbox.exec("sleep 40", timeout_seconds=LONG))
    timer.join()
    assert code in ("CR0335", "CR0336")
    sandbox.close()


def test_an_eviction_for_what_the_command_wrote_is_a_result(
    cluster: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = Kubernetes().open(SandboxSpec(tree))
    pod = next(iter(cluster.pods.values()))

    def evict() -> None:
        deadline = time.monotonic() + LONG
        while not (pod.folder / "volumes" / "tree" / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        pod.is_deleted = True
        pod.status = {
            "phase": "Failed",
            "reason": "Evicted",
            "message": 'Usage of EmptyDir volume "tree" exceeds the limit "300Mi".',
        }
        pod.containers["task"].kill()
        cluster.cut_connections()

    evictor = threading.Thread(target=evict)
    evictor.start()
    result = sandbox.exec("touch up; sleep 90", timeout_seconds=2 * LONG)
    evictor.join()
    assert (result.exit_code, result.out_of_memory) == (137, False)
    assert "disk" in result.stderr
    monkeypatch.setattr(pod_exec, "_CONNECT_SECONDS", 0.5)  # so long it is asked to go on
    assert code_of(lambda: sandbox.exec("true", timeout_seconds=LONG))[0] == "CR0335"
    sandbox.close()


def test_after_running_out_of_memory_the_tree_is_still_there(cluster: Any, tree: Path) -> None:
    (tree / "kept").write_text("before")
    code = "import os; os.fork(); held = bytearray(90 << 20); held[::4096] = b'x' * len(held[::4096]); import time; time.sleep(30)"
    with Kubernetes().open(SandboxSpec(tree, limits=Limits(memory_bytes=128 << 20))) as sandbox:
        result = sandbox.exec([str(base_python()), "-I", "-c", code], timeout_seconds=LONG)
        assert (result.exit_code, result.out_of_memory) == (137, True)
        assert sandbox.exec("cat kept", timeout_seconds=LONG).stdout == "before"


def test_pods_that_have_ended_are_swept(cluster: Any, tree: Path) -> None:
    for name, phase in (("old", "Failed"), ("done", "Succeeded"), ("alive", "Running")):
        client = ApiClient(find_access())
        cluster.freeze = {"phase": phase}
        labels = {pod_manifest.LABEL: "true"} if name != "done" else {"somebody": "else"}
        body = {"metadata": {"name": name, "labels": labels}, "spec": {"volumes": []}}
        client.ask("POST", "/api/v1/namespaces/jails/pods", body=body)
    cluster.freeze = None
    with Kubernetes().open(SandboxSpec(tree)):
        assert {"done", "alive"} <= set(cluster.pods)
        assert "old" not in cluster.pods
    cluster.pods.clear()


class Forgetful(Kubernetes):
    """Forgets the network policy, so that its pods keep their network."""

    def open(self, spec: SandboxSpec) -> Any:
        from composer_replication.sandbox.pods.pod_life import PodLife

        class Open(PodLife):
            def _ensure_policy(self) -> None:
                return

        return kubernetes_backend.KubernetesSandbox(spec, Open(self._client(), self.settings))


@pytest.mark.long
def test_a_pod_without_its_policy_fails_the_self_test(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from composer_replication.sandbox import selftest

    monkeypatch.setattr(
        selftest, "GUARDS", {name: selftest.GUARDS[name] for name in ("network", "environment")}
    )
    network, environment = run_selftest(Forgetful())
    assert (network.ok, environment.ok) == (False, True)
    assert "the server of the cluster" in network.detail
    cluster.keeps_routes = True  # and a policy that drops what takes it
    assert all(check.ok for check in run_selftest(Kubernetes()))


def test_a_retry_after_is_obeyed(cluster: Any) -> None:
    cluster.faults.append(Fault("GET", refusal(429, "TooManyRequests", "later", {"Retry-After": "1"})))
    started = time.monotonic()
    ApiClient(find_access()).ask("GET", "/api/v1/namespaces/jails/pods")
    assert len(cluster.seen) == 2
    assert time.monotonic() - started >= 1.0  # a lower bound is what was asked for, not a speed
    cluster.faults.append(Fault("GET", refusal(429, "TooManyRequests", "later", {"Retry-After": "9"})))
    with pytest.raises(ApiRefusal, match="later"):
        ApiClient(find_access(), patience_seconds=1.0).ask("GET", "/api/v1/namespaces/jails/pods")
    assert len(cluster.seen) == 3
