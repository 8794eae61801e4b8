"""What goes wrong between us and a container engine is a failure with one sentence, never a result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_http import Fault, cut_the_answer, hang_up, no_http, no_json, status

from composer_replication.errors import MissingError, SandboxFailure
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import base_python, run_selftest, runs_interrupted, selftest
from composer_replication.sandbox.engine import container_run
from composer_replication.sandbox.engine.docker import Docker, EngineSettings, Podman
from composer_replication.sandbox.engine.engine_client import EngineClient
from composer_replication.sandbox.engine.orphans import is_dead, owner, remove_orphans

LONG = 60.0


def code_of(act: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises((SandboxFailure, MissingError)) as caught:
        act()
    return caught.value.code, str(caught.value)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        (Fault("POST /containers/create", status(404, "No such image: x")), "CR0322", "No such image"),
        (Fault("POST /containers/create", status(409, "Conflict. The name is in use")), "CR0321", "Conflict"),
        (Fault("POST /containers/create", status(500, "no space left on device")), "CR0321", "no space"),
        (Fault("POST /containers/create", hang_up), "CR0320", "cannot be asked"),
        (Fault("POST /containers/create", no_json), "CR0321", "no JSON"),
        (Fault("POST /containers/.*/attach", status(500, "logging driver")), "CR0321", "attach"),
        (Fault("POST /containers/.*/attach", hang_up), "CR0320", "hung up"),
        (Fault("POST /containers/.*/attach", no_http), "CR0320", "no HTTP"),
        (
            Fault("POST /containers/.*/start", status(500, "OCI runtime create failed")),
            "CR0321",
            "OCI runtime",
        ),
        (Fault("POST /containers/.*/start", status(404, "No such container")), "CR0321", "start"),
        (Fault("GET /containers/.*/json", cut_the_answer, times=99), "CR0320", "cannot be asked"),
        (
            Fault("GET /containers/.*/json", status(404, "No such container"), times=99),
            "CR0321",
            "describe|start",
        ),
    ],
)
def test_a_fault_is_a_failure_and_leaves_no_container(
    engine: Any, tree: Path, fault: Fault, code: str, said: str
) -> None:
    with Docker().open(SandboxSpec(tree)) as sandbox:
        engine.faults.append(fault)
        found, sentence = code_of(lambda: sandbox.exec(["true"], timeout_seconds=LONG))
        assert found == code
        assert any(word in sentence for word in said.split("|")), sentence
        engine.faults.clear()
        assert engine.containers == {}
        assert sandbox.exec(["echo", "on"], timeout_seconds=LONG).stdout == "on\n"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("GET /version", hang_up), "CR0320"),
        (Fault("GET /version", no_http), "CR0320"),
        (Fault("GET /version", no_json), "CR0321"),
        (Fault("GET /info", status(500, "broken")), "CR0321"),
        (Fault("GET /images", status(500, "broken")), "CR0321"),
        (Fault("POST /images/create", status(500, "broken")), "CR0321"),
        (Fault("POST /images/create", lambda handler: handler.say(200, {"error": "bad tar"})), "CR0321"),
        (Fault("GET /containers/json", status(500, "broken")), "CR0321"),
    ],
)
def test_a_fault_at_the_opening(engine: Any, tree: Path, fault: Fault, code: str) -> None:
    engine.faults.append(fault)
    assert code_of(lambda: Docker().open(SandboxSpec(tree)))[0] == code
    assert not Docker(EngineSettings(image="absent:1")).is_available().ok


def test_an_old_engine_and_no_engine(engine: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.api_version = "1.40"
    assert code_of(lambda: Docker().open(SandboxSpec(tree)))[0] == "CR0321"
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    assert code_of(lambda: Docker().open(SandboxSpec(tree)))[0] == "CR0301"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tree}/absent.sock")
    assert code_of(lambda: Docker().open(SandboxSpec(tree)))[0] == "CR0320"
    monkeypatch.setenv("CONTAINER_HOST", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tree))
    check = Podman().is_available()
    assert not check.ok
    assert "podman.socket" in check.fix


def test_an_image_that_is_missing(engine: Any, tree: Path) -> None:
    with Docker(EngineSettings(image="absent:1")).open(SandboxSpec(tree)) as sandbox:
        code, sentence = code_of(lambda: sandbox.exec(["true"], timeout_seconds=LONG))
    assert code == "CR0322"
    assert "absent:1" in sentence


def test_the_daemon_dies_while_a_command_runs(engine: Any, tree: Path) -> None:
    sandbox = Docker().open(SandboxSpec(tree))
    found: list[tuple[str, str]] = []
    runner = threading.Thread(
        target=lambda: found.append(code_of(lambda: sandbox.exec("touch up; sleep 50", timeout_seconds=LONG)))
    )
    runner.start()
    while not (tree / "up").exists():
        time.sleep(0.01)
    engine.die()
    runner.join()
    assert found[0][0] in ("CR0320", "CR0323")
    sandbox.close()


def test_somebody_removes_the_container_while_it_runs(engine: Any, tree: Path) -> None:
    with Docker().open(SandboxSpec(tree)) as sandbox:
        runner = threading.Thread(target=lambda: _remove_when_up(engine, tree))
        runner.start()
        code, _ = code_of(lambda: sandbox.exec("touch up; sleep 50", timeout_seconds=LONG))
        runner.join()
    assert code in ("CR0321", "CR0323")


def _remove_when_up(engine: Any, tree: Path) -> None:
    while not (tree / "up").exists():
        time.sleep(0.01)
    EngineClient(str(engine.socket_path)).ask("DELETE", f"/containers/{next(iter(engine.containers))}")


def _byte_by_byte(handler: Any, frame: bytes) -> list[bytes]:
    return [bytes([byte]) for byte in frame]


def test_a_slow_stream_in_single_bytes_is_whole(engine: Any, tree: Path) -> None:
    engine.garble = _byte_by_byte
    with Docker().open(SandboxSpec(tree)) as sandbox:
        result = sandbox.exec("printf abc; printf def >&2; exit 4", timeout_seconds=LONG)
    assert (result.exit_code, result.stdout, result.stderr) == (4, "abc", "def")


def test_a_stream_cut_in_a_frame(engine: Any, tree: Path) -> None:
    engine.garble = lambda handler, frame: [frame[:-1]]
    with Docker().open(SandboxSpec(tree)) as sandbox:
        assert code_of(lambda: sandbox.exec("sleep 0.3", timeout_seconds=LONG))[0] == "CR0323"


def test_what_is_no_frame(engine: Any, tree: Path) -> None:
    engine.garble = lambda handler, frame: [b"<html>502</html>"]
    with Docker().open(SandboxSpec(tree)) as sandbox:
        assert code_of(lambda: sandbox.exec("echo a", timeout_seconds=LONG))[0] == "CR0323"
        assert engine.containers == {}


def test_streams_let_go_while_the_command_runs(
    engine: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_run, "_END_SECONDS", 0.3)

    def let_go(handler: Any, frame: bytes) -> list[bytes]:
        handler.wfile.write(frame)
        handler.connection.shutdown(2)
        return []

    engine.garble = let_go
    with Docker().open(SandboxSpec(tree)) as sandbox:
        assert code_of(lambda: sandbox.exec("sleep 30", timeout_seconds=LONG))[0] == "CR0323"


def test_a_container_that_cannot_be_killed(engine: Any, tree: Path) -> None:
    with Docker().open(SandboxSpec(tree)) as sandbox:
        engine.faults.append(
            Fault("POST /containers/.*/kill", status(500, "tried to kill container, no exit"))
        )
        assert code_of(lambda: sandbox.exec("sleep 50", timeout_seconds=0.5))[0] == "CR0324"


def test_a_removal_that_is_refused_is_said(engine: Any, tree: Path) -> None:
    with Docker().open(SandboxSpec(tree)) as sandbox:
        engine.faults.append(Fault("DELETE /containers/", status(500, "device or resource busy")))
        code, sentence = code_of(lambda: sandbox.exec("true", timeout_seconds=LONG))
    assert (code, "busy" in sentence) == ("CR0321", True)


def test_an_interruption_ends_the_run(engine: Any, tree: Path) -> None:
    with Docker().open(SandboxSpec(tree)) as sandbox:
        found: list[tuple[str, str]] = []
        runner = threading.Thread(
            target=lambda: found.append(
                code_of(lambda: sandbox.exec("touch up; sleep 50", timeout_seconds=LONG))
            )
        )
        runner.start()
        while not (tree / "up").exists():
            time.sleep(0.01)
        with runs_interrupted():
            runner.join()
    assert found[0][0] == "CR0302"
    assert engine.containers == {}


def test_out_of_memory_is_told_by_the_engine(engine: Any, tree: Path) -> None:
    code = "held = bytearray(60 << 20); held[::4096] = b'x' * len(held[::4096]); import time; time.sleep(30)"
    with Docker().open(SandboxSpec(tree, limits=Limits(memory_bytes=200 << 20))) as sandbox:
        from composer_replication.sandbox import base_python

        many = " & ".join([f"{base_python()} -I -c '{code.replace(chr(39), chr(34))}'"] * 5)
        result = sandbox.exec(f"{many} & sleep 30", timeout_seconds=LONG)
    assert (result.exit_code, result.out_of_memory, result.timed_out) == (137, True, False)
    assert "memory" in result.stderr.splitlines()[-1]


def test_what_is_asked_for(engine: Any, tree: Path) -> None:
    limits = Limits(memory_bytes=300 << 20, num_processes=20, disk_bytes=8 << 20, num_open_files=50)
    with Docker(EngineSettings(runtime="runsc")).open(SandboxSpec(tree, limits=limits)) as sandbox:
        sandbox.exec(["true"], timeout_seconds=LONG)
    ((_, body),) = engine.bodies
    host = body["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert (host["Memory"], host["MemorySwap"]) == (300 << 20, 300 << 20)
    assert host["PidsLimit"] == 21  # and the init of the container
    assert (host["IpcMode"], host["Init"], host["Runtime"]) == ("private", True, "runsc")
    assert {entry["Name"]: entry["Hard"] for entry in host["Ulimits"]} == {
        "core": 0, "data": 300 << 20, "fsize": 8 << 20, "nofile": 50,
    }  # fmt: skip
    uid = int(body["User"].partition(":")[0])
    assert uid != 0
    writable = {mount["Target"] for mount in host["Mounts"] if not mount["ReadOnly"]}
    assert str(tree) in writable
    assert writable - {str(tree), "/tmp", "/var/tmp", "/dev/shm"} == {
        str(sandbox._jailed.scratch.home), str(sandbox._jailed.scratch.tmp),
    }  # fmt: skip
    assert not any("docker.sock" in mount["Source"] for mount in host["Mounts"])
    assert body["Labels"]["composer-rl.owner"] == owner()


@pytest.mark.parametrize(
    ("options", "components", "user", "namespace"),
    [
        (["name=rootless"], "Engine", "0:0", None),
        (["name=rootless"], "Podman Engine", None, "keep-id"),
        (["name=userns"], "Engine", None, "host"),
    ],
)
def test_as_whom_it_runs(
    engine: Any, tree: Path, options: list[str], components: str, user: str | None, namespace: str | None
) -> None:
    engine.security_options = options
    engine.components = [{"Name": components}]
    inside = Docker()._inside(EngineClient(str(engine.socket_path)), components)
    assert user is None or inside.user == user
    assert (inside.user_namespace or None) == namespace


class Forgetful(Docker):
    """Asks for a network, which the engine then gives."""

    name = "forgetful"

    def open(self, spec: SandboxSpec) -> Any:
        sandbox = super().open(spec)
        ask = sandbox._request  # type: ignore[attr-defined]

        def with_network(*args: Any) -> dict[str, Any]:
            request = ask(*args)
            request["HostConfig"]["NetworkMode"] = "host"
            return dict(request)

        sandbox._request = with_network  # type: ignore[attr-defined]
        return sandbox


@pytest.mark.usefixtures("engine")
def test_a_request_that_forgets_a_guard_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {name: selftest.GUARDS[name] for name in ("network", "host_files", "environment")}
    monkeypatch.setattr(selftest, "GUARDS", tried)
    assert [check.name for check in run_selftest(Forgetful()) if not check.ok] == ["network"]
    assert [check for check in run_selftest(Docker()) if not check.ok] == []


def test_containers_of_the_dead_are_removed_and_those_of_the_living_stay(engine: Any, tree: Path) -> None:
    boot, namespace, pid, start = owner().split(":")
    client = EngineClient(str(engine.socket_path))
    root = engine.folder / "root"
    root.mkdir()
    engine.images["x:1"] = root
    for name in (
        owner(),
        f"{boot}:{namespace}:{pid}:1{start}",
        f"other-boot:{namespace}:{pid}:1",
        "nonsense",
    ):
        labels = {"composer-rl.sandbox": "1", "composer-rl.owner": name}
        client.ask("POST", "/containers/create", body={"Image": "x:1", "Labels": labels, "HostConfig": {}})
    client.ask("POST", "/containers/create", body={"Image": "x:1", "Labels": {}, "HostConfig": {}})
    assert remove_orphans(client) == 1
    assert len(engine.containers) == 4
    assert not is_dead(owner())


def test_open_files_that_a_container_keeps_on_their_way_in_a_socket_end_it(engine: Any, tree: Path) -> None:
    """No limit of the engine counts what a deleted file holds there."""
    code = (
        "import os, socket, sys, time\n"
        "one, two = socket.socketpair()\n"
        "held = os.open('bomb', os.O_CREAT | os.O_WRONLY); os.unlink('bomb')\n"
        "socket.send_fds(one, [b'x'], [held]); os.close(held)\n"
        "time.sleep(30)"
    )
    with Docker().open(SandboxSpec(tree)) as sandbox:
        done = sandbox.exec([str(base_python()), "-I", "-c", code], timeout_seconds=LONG)
    assert done.exit_code == 137, done
    assert "open or mapped files where no limit counts them" in done.stderr
