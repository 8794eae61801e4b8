"""Parts of the pod backend by themselves: states, manifests, scripts, transfer, access."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox.pods import cluster_access, pod_scripts
from composer_replication.sandbox.pods.cluster_access import find_access
from composer_replication.sandbox.pods.pod_manifest import PodSettings, network_policy, pod_manifest
from composer_replication.sandbox.pods.pod_plan import PodPlan
from composer_replication.sandbox.pods.pod_scripts import Measured, measure, orders
from composer_replication.sandbox.pods.pod_state import is_over_own_disk_limit, state_of
from composer_replication.sandbox.pods.tree_transfer import UnsafeTreeError, pack_tree, unpack_tree
from composer_replication.sandbox.pods.websocket import WebSocket, WebSocketEndedError, masked
from composer_replication.sandbox.private_folders import Scratch


def task(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"status": {"phase": "Running", "containerStatuses": [{"name": "task", "state": state, **more}]}}


def stage(state: dict[str, Any]) -> dict[str, Any]:
    return {"status": {"phase": "Pending", "initContainerStatuses": [{"name": "stage", "state": state}]}}


KILLED = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}


@pytest.mark.parametrize(
    ("pod", "kind", "why", "is_out_of_memory"),
    [
        ({}, "waiting", "nothing is known", False),
        ({"status": {"phase": "Pending"}}, "waiting", "Pending", False),
        (stage({"running": {}}), "staging", "", False),
        (stage({"waiting": {"reason": "PodInitializing"}}), "waiting", "PodInitializing", False),
        (
            stage({"waiting": {"reason": "ErrImagePull", "message": "timeout"}}),
            "waiting",
            "ErrImagePull",
            False,
        ),
        (task({"running": {"startedAt": "now"}}), "ready", "", False),
        (task({"running": {}}, restartCount=2, lastState=KILLED), "ready", "", True),
        (task({"waiting": {"reason": "CrashLoopBackOff"}}, lastState=KILLED), "waiting", "CrashLoop", True),
        (task(KILLED, restartCount=1), "waiting", "Running", True),
    ],
)
def test_states(pod: dict[str, Any], kind: str, why: str, is_out_of_memory: bool) -> None:
    state = state_of(pod)
    assert (state.kind, state.is_out_of_memory) == (kind, is_out_of_memory)
    assert why in state.why


def condition(kind: str, status: str, **more: str) -> dict[str, Any]:
    return {"status": {"phase": "Running", "conditions": [{"type": kind, "status": status, **more}]}}


@pytest.mark.parametrize(
    ("pod", "code", "said"),
    [
        (
            task({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}}),
            "CR0334",
            "Back-off",
        ),
        (task({"waiting": {"reason": "InvalidImageName"}}), "CR0334", "InvalidImageName"),
        (
            stage({"waiting": {"reason": "CreateContainerConfigError", "message": "no claim"}}),
            "CR0334",
            "no claim",
        ),
        (stage({"terminated": {"exitCode": 127}}), "CR0334", "exit code 127"),
        (
            {"status": {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}},
            "CR0335",
            "was evicted",
        ),
        ({"status": {"phase": "Failed", "reason": "DeadlineExceeded"}}, "CR0335", "longer than it may"),
        ({"status": {"phase": "Failed", "reason": "Preempting", "message": "m"}}, "CR0335", "preempted"),
        ({"status": {"phase": "Failed", "reason": "OutOfmemory"}}, "CR0335", "OutOfmemory"),
        ({"status": {"phase": "Succeeded"}}, "CR0335", "ended by itself"),
        ({"status": {"phase": "Unknown", "reason": "NodeLost"}}, "CR0335", "does not answer"),
        (
            condition("DisruptionTarget", "True", reason="PreemptionByScheduler"),
            "CR0335",
            "PreemptionByScheduler",
        ),
        ({"metadata": {"deletionTimestamp": "now"}, "status": {"phase": "Running"}}, "CR0335", "deleted"),
    ],
)
def test_states_without_hope(pod: dict[str, Any], code: str, said: str) -> None:
    with pytest.raises(SandboxFailure, match=said) as caught:
        state_of(pod)
    assert caught.value.code == code


def test_whose_fault_an_eviction_is() -> None:
    def evicted(message: str) -> dict[str, Any]:
        return {"status": {"phase": "Failed", "reason": "Evicted", "message": message}}

    assert is_over_own_disk_limit(evicted('Usage of EmptyDir volume "tree" exceeds the limit "1Gi".'))
    assert is_over_own_disk_limit(evicted("Container task exceeded its local ephemeral storage limit"))
    assert is_over_own_disk_limit(
        evicted("Pod ephemeral local storage usage exceeds the total limit of containers 9.")
    )
    assert not is_over_own_disk_limit(evicted("The node was low on resource: ephemeral-storage."))
    assert not is_over_own_disk_limit(evicted("The node was low on resource: memory."))
    assert not is_over_own_disk_limit({"status": {"phase": "Failed", "message": "emptyDir"}})


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[tuple[PodPlan, SandboxSpec, Scratch]]:
    tree, shown = tmp_path / "tree", tmp_path / "shown"
    tree.mkdir()
    (shown / "secret").mkdir(parents=True)
    (shown / "secret" / "hidden.txt").write_text("hush")
    (shown / "seen.txt").write_text("hello")
    (tmp_path / "store" / "big").mkdir(parents=True)
    scratch = Scratch()
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        scratch.write(name, "x\n")
    spec = SandboxSpec(tree, (shown, tmp_path / "store" / "big"), (shown / "secret",))
    yield PodPlan(spec, scratch, ((tmp_path / "store", "store-claim"),)), spec, scratch
    scratch.remove()


def manifest_of(plan: PodPlan, **more: Any) -> dict[str, Any]:
    return pod_manifest(
        "composer-rl-1", plan, PodSettings(image="registry.example/trainer:1", claims=plan.claims), Limits(),
        uid=1700000000, owner="composer-rl-owner", num_stage_bytes=1000, tree_bytes=2000, **more,
    )  # fmt: skip


def test_the_pod_has_no_rights(plan: tuple[PodPlan, SandboxSpec, Scratch]) -> None:
    pod = manifest_of(plan[0], owner_pod={"name": "trainer-0", "uid": "u-1"})
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["activeDeadlineSeconds"] == 6 * 3600
    assert "hostNetwork" not in spec
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["runAsUser"]) == (
        True,
        1700000000,
    )
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u-1"
    for container in (*spec["initContainers"], *spec["containers"]):
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"] == str(2 << 30)
    assert all("emptyDir" in volume or "persistentVolumeClaim" in volume for volume in spec["volumes"])
    assert all(volume["emptyDir"]["sizeLimit"] for volume in spec["volumes"] if "emptyDir" in volume)


def test_what_a_pod_shows(plan: tuple[PodPlan, SandboxSpec, Scratch], tmp_path: Path) -> None:
    mounts = {
        mount["mountPath"]: mount for mount in manifest_of(plan[0])["spec"]["containers"][0]["volumeMounts"]
    }
    assert mounts[str(tmp_path / "shown")]["readOnly"] is True
    assert "readOnly" not in mounts[str(tmp_path / "tree")]
    claim = mounts[str(tmp_path / "store" / "big")]
    assert (claim["name"], claim["subPath"], claim["readOnly"]) == ("claim-0", "big", True)
    assert "/tmp" not in mounts or not str(tmp_path).startswith("/tmp")
    buffer = io.BytesIO()
    plan[0].write_stage(buffer)
    buffer.seek(0)
    with tarfile.open(fileobj=buffer) as archive:
        names = archive.getnames()
    assert any(name.endswith("seen.txt") for name in names)
    assert not any("secret" in name or "hidden" in name for name in names)


def test_the_policy_lets_nothing_through() -> None:
    spec = network_policy()["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in spec
    assert "egress" not in spec
    assert spec["podSelector"]["matchLabels"]


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_the_manifests_are_valid(plan: tuple[PodPlan, SandboxSpec, Scratch], version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    pod = manifest_of(plan[0], owner_pod={"name": "trainer-0", "uid": "u-1"})
    validate.validate(pod, version, strict=True)
    validate.validate(network_policy(), version, strict=True)
    pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(validate.ValidationError):
        validate.validate(pod, version, strict=True)


def test_what_a_look_prints(tmp_path: Path) -> None:
    text = "12\t/tree\n4\t/home\ndeleted 8 1:2 regular file\ndeleted 8 1:2 regular file\ndeleted 9 1:3 fifo\noom 3\nnonsense\n"
    assert Measured.of(text) == Measured(16 * 1024 + 8 * 512, 3)
    text += "mapped 2 /tree/open (deleted)\nmapped 7 /memfd:x (deleted)\nmapped 8 /dev/shm/sem.x (deleted)\n"
    assert Measured.of(text) == Measured(16 * 1024 + 8 * 512, 3, are_files_hidden=True)
    text += "shm 1 100 90 4096\n"  # what is in memory is counted there, open or mapped
    assert Measured.of(text) == Measured(16 * 1024 + 10 * 4096, 3)
    assert Measured.of(text + "mapped 9 /tree/a\x0cb (deleted)\n").are_files_hidden
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    held = (tmp_path / "held").open("wb")
    held.write(b"x" * 50_000)
    held.flush()
    (tmp_path / "held").unlink()
    done = subprocess.run(["sh", "-c", measure([tmp_path])], capture_output=True, text=True, check=True)
    held.close()
    assert Measured.of(done.stdout).used_bytes >= 150_000


def test_a_script_gives_words_on_as_they_are(tmp_path: Path) -> None:
    words = ["a b", "$HOME", "", "-n", "'\"", "é\n", "`id`"]
    data = orders(
        ["printf", "%s|", *words], {"A": "b c'"}, tree=tmp_path, stdin=b"in", marker="<m>", limits=Limits()
    )
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        script = archive.extractfile("script").read().decode()
        assert archive.extractfile("stdin").read() == b"in"
    (line,) = [
        line for line in script.split("\n<")[0].splitlines(keepends=True) if line.startswith("env -i")
    ] or [""]
    command = script[script.index("env -i") : script.index(" <&9 9<&-")]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "|".join([*words, ""])
    assert line.startswith("env -i")


@given(payload=st.binary(max_size=400), mask=st.binary(min_size=4, max_size=4))
def test_masking_is_its_own_inverse(payload: bytes, mask: bytes) -> None:
    hidden = masked(payload, mask)
    assert hidden == bytes(byte ^ mask[number % 4] for number, byte in enumerate(payload))
    assert masked(hidden, mask) == payload


def test_a_tree_travels_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "d" / "empty").mkdir(parents=True)
    (source / "d" / "f").write_bytes(b"\0\1")
    (source / "d" / "f").chmod(0o751)
    (source / "d").chmod(0o700)
    (source / "link").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    target.mkdir()
    (target / "old").write_text("gone afterwards")
    buffer = io.BytesIO()
    pack_tree(source, buffer)
    buffer.seek(0)
    unpack_tree(buffer, target)
    assert sorted(path.name for path in target.rglob("*")) == ["d", "empty", "f", "link", "pipe"]
    assert (target / "d" / "f").read_bytes() == b"\0\1"
    assert (target / "d" / "f").stat().st_mode & 0o777 == 0o751
    assert (target / "d").stat().st_mode & 0o777 == 0o700
    assert (target / "link").readlink() == Path("/etc/passwd")


SPARSE_BYTES = 5 << 30


@pytest.mark.parametrize("has_end", [False, True])
def test_holes_of_a_file_are_not_sent(tmp_path: Path, has_end: bool) -> None:
    """Out as GNU tar understands it, back as GNU tar writes it, and neither way is the hole filled."""
    source, inside, target = (tmp_path / name for name in ("source", "inside", "target"))
    for folder in (source, inside, target):
        folder.mkdir()
    with (source / "big").open("wb") as handle:
        handle.seek(3 << 30)
        handle.write(b"in the middle")
        handle.truncate(SPARSE_BYTES)
        if has_end:
            handle.seek(-3, os.SEEK_END)
            handle.write(b"end")
    (source / "later").write_text("whole")
    buffer = io.BytesIO()
    assert pack_tree(source, buffer)
    assert len(buffer.getvalue()) < 1 << 20
    subprocess.run(["tar", "-xpf", "-"], cwd=inside, input=buffer.getvalue(), check=True)
    script = ["/bin/sh", "-c", pod_scripts.PACK_TREE, "sandbox", str(inside)]
    unpack_tree(io.BytesIO(subprocess.run(script, capture_output=True, check=True).stdout), target)
    for folder in (inside, target):
        with (folder / "big").open("rb") as handle:
            handle.seek(3 << 30)
            assert handle.read(14) == b"in the middle\0"
            handle.seek(-4, os.SEEK_END)
            assert handle.read() == (b"\0end" if has_end else bytes(4))
        info = (folder / "big").stat()
        assert (info.st_size, info.st_blocks * 512 < 1 << 20) == (SPARSE_BYTES, True)
        assert (folder / "later").read_text() == "whole"


def test_a_file_with_holes_needs_gnu_tar(tmp_path: Path) -> None:
    """Another one would take the table of the holes for the content."""
    program = tmp_path / "bin" / "tar"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho tar of a small image; cat > /dev/null\n")
    program.chmod(0o755)
    (tmp_path / "tree").mkdir()
    environment = {"PATH": f"{program.parent}:{os.defpath}"}
    for word, code in (("holes", 1), ("", 0)):
        command = ["/bin/sh", "-c", pod_scripts.UNPACK_TREE, "sandbox", "0", str(tmp_path / "tree"), word]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, input="")
        assert (done.returncode, "GNU tar" in done.stderr) == (code, bool(code)), done.stderr


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    return found


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../out")],
        [entry("/etc/cron.d/x")],
        [entry("a/../../out")],
        [entry("link", tarfile.SYMTYPE, ".."), entry("link/out")],
        [entry("file"), entry("file/x")],
        [entry("dev", tarfile.CHRTYPE)],
        [entry("link", tarfile.SYMTYPE, "/etc/passwd"), entry("hard", tarfile.LNKTYPE, "link")],
        [entry("hard", tarfile.LNKTYPE, "../secret")],
    ],
)
def test_an_archive_that_leads_out_is_refused(tmp_path: Path, entries: list[tarfile.TarInfo]) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tmp_path / "secret").write_text("hush")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for one in entries:
            archive.addfile(one)
    buffer.seek(0)
    with pytest.raises(UnsafeTreeError):
        unpack_tree(buffer, tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "tree"]
    assert (tmp_path / "secret").read_text() == "hush"


def test_no_archive_at_all(tmp_path: Path) -> None:
    with pytest.raises(UnsafeTreeError):
        unpack_tree(io.BytesIO(b"tar: error\n" * 100), tmp_path)


def write_config(path: Path, user: dict[str, Any], cluster: dict[str, Any] | None = None) -> Path:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://k.example:6443/", **(cluster or {})}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(config))
    return path


def test_tokens_of_a_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/absent:{config}")
    write_config(config, {"token": "plain"})
    access = find_access()
    assert (access.server, access.namespace, access.token()) == ("https://k.example:6443", "default", "plain")
    (tmp_path / "token").write_text("first\n")
    write_config(config, {"tokenFile": "token"})
    access = find_access()
    assert access.token() == "first"
    (tmp_path / "token").write_text("renewed")
    assert access.token() == "renewed"
    plugin = tmp_path / "plugin"
    plugin.write_text('#!/bin/sh\nprintf \'{"status": {"token": "of-%s"}}\' "$WHO"\n')
    plugin.chmod(0o755)
    write_config(config, {"exec": {"command": str(plugin), "env": [{"name": "WHO", "value": "cloud"}]}})
    assert find_access().token() == "of-cloud"


def test_a_kubeconfig_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    config = tmp_path / "config"
    config.write_text(
        "current-context: c\ncontexts:\n- {name: c, context: {cluster: k, user: u, namespace: n}}\n"
        "clusters:\n- {name: k, cluster: {server: 'http://k.example'}}\nusers:\n- {name: u, user: {token: t}}\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    access = find_access()
    assert (access.server, access.namespace, access.token(), access.tls) == (
        "http://k.example",
        "n",
        "t",
        None,
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "a: [", '{"current-context": "absent"}', '{"contexts": 3, "current-context": "c"}', "\0"],
)
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(MissingError) as caught:
        find_access()
    assert caught.value.code == "CR0330"


@pytest.mark.parametrize(
    ("user", "cluster"),
    [
        ({"exec": {"command": "/nonexistent/plugin"}}, {}),
        ({"exec": {"command": "false"}}, {}),
        ({"exec": {"command": "true"}}, {}),
        ({}, {"certificate-authority": "absent.crt"}),
        ({}, {"certificate-authority-data": base64.b64encode(b"no certificate").decode()}),
        ({"client-certificate-data": base64.b64encode(b"no certificate").decode()}, {}),
    ],
)
def test_credentials_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: dict[str, Any], cluster: dict[str, Any]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(write_config(tmp_path / "config", user, cluster)))
    with pytest.raises(MissingError) as caught:
        find_access()
    assert caught.value.code == "CR0330"


def test_from_inside_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cluster_access, "SERVICE_ACCOUNT", tmp_path)
    with pytest.raises(MissingError, match="neither"):
        find_access()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("HOSTNAME", "trainer-0")
    (tmp_path / "token").write_text("mounted\n")
    with pytest.raises(MissingError) as caught:
        find_access()
    assert caught.value.code == "CR0330"
    (tmp_path / "namespace").write_text("jails")
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-subj", "/CN=test", "-keyout", "/dev/null", "-out", str(tmp_path / "ca.crt")],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip("openssl makes no certificate here")
    access = find_access()
    assert (access.server, access.namespace) == ("https://[fd00::1]:443", "jails")
    assert (access.token(), access.own_pod) == ("mounted", "trainer-0")


def test_what_came_behind_a_ping_counts_though_the_other_side_has_hung_up(monkeypatch) -> None:
    ours, theirs = socket.socketpair()
    connection = SimpleNamespace(connect=lambda: None, sock=ours, host="pod", port=1)
    monkeypatch.setattr(WebSocket, "_shake_hands", lambda *_: None)
    channel = WebSocket(
        cast("Any", SimpleNamespace(connection=lambda: connection)), "/exec", ["v5.channel.k8s.io"]
    )
    with ours:
        theirs.sendall(bytes([0x89, 0]) + bytes([0x82, 3]) + b"end")
        theirs.close()
        assert channel.receive(5.0) == b"end"
        with pytest.raises(WebSocketEndedError):
            channel.receive(5.0)
