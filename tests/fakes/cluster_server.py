"""An API server with one node over real TCP: pods are ``bwrap`` containers, ``exec`` enters them.

The kubelet of this fake does what a manifest says and nothing else: a missing ``readOnlyRootFilesystem`` is a
writable root, a missing network policy an open network. Needs root, for ``nsenter``.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socketserver
import subprocess
import tarfile
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from container_process import Confinement, ContainerProcess, as_user
from faulty_http import FaultyHandler, FaultyServer
from websocket_server import ServerSocket

from composer_replication.sandbox.engine.root_image import root_tar
from composer_replication.sandbox.folder_removal import remove_folder
from composer_replication.sandbox.host_paths import (
    base_interpreter,
    base_python,
    resolve_links,
    system_folders,
)
from composer_replication.sandbox.syscall_filter import filter_program

TOKEN = "token-of-the-test"
_SECCOMP = (
    "import ctypes, os, sys\n"
    "data = bytes.fromhex(sys.argv[1])\n"
    "buffer = ctypes.create_string_buffer(data, len(data))\n"
    "class Program(ctypes.Structure): _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_void_p)]\n"
    "program = Program(len(data) // 8, ctypes.cast(buffer, ctypes.c_void_p))\n"
    "library = ctypes.CDLL(None)\n"
    "if data and library.prctl(22, 2, ctypes.byref(program), 0, 0): sys.exit('no seccomp')\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)

# A route through the loopback device, by SIOCADDRT.
_ADD_ROUTE = """
import ctypes, fcntl, socket, struct
name = ctypes.create_string_buffer(b"lo")
to, mask = (struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text)) for text in ("192.0.2.0", "255.255.255.0"))
entry = struct.pack("L16s16s16sHhLPhPLLH", 0, to, bytes(16), mask, 1, 0, 0, 0, 0, ctypes.addressof(name), 0, 0, 0)
fcntl.ioctl(socket.socket(), 0x890B, entry)
"""


@dataclass
class FakePod:
    manifest: dict[str, Any]
    folder: Path
    status: dict[str, Any] = field(default_factory=lambda: {"phase": "Pending"})
    containers: dict[str, ContainerProcess] = field(default_factory=dict)
    num_restarts: int = 0
    is_deleted: bool = False
    last_state: dict[str, Any] = field(default_factory=dict)

    def spec_of(self, name: str) -> dict[str, Any]:
        spec = self.manifest["spec"]
        return next(
            entry for entry in [*spec["initContainers"], *spec["containers"]] if entry["name"] == name
        )

    def described(self) -> dict[str, Any]:
        return {**self.manifest, "status": self.status}


class FakeCluster(FaultyServer, socketserver.ThreadingTCPServer):
    """Serve it with ``with``. ``freeze`` is a status that every new pod keeps for ever.

    ``keeps_routes``: a closed pod has a route all the same, as where a policy drops what is sent.
    """

    allow_reuse_address = True

    def __init__(self, folder: Path) -> None:
        self.prepare()
        self.folder = folder
        self.pods: dict[str, FakePod] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self.protocols = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
        self.allowed = True
        self.refused: set[str] = set()
        self.freeze: dict[str, Any] | None = None
        self.keeps_routes = False
        self.exec_fault: Any = None
        self.image = folder / "image"
        links: dict[Path, str] = {}
        self.image_mounts: list[tuple[str, str, bool]] = []
        for path in (*system_folders().read_only, *base_interpreter().read_only):
            real, found = resolve_links(path)
            links.update(found)
            self.image_mounts.append((str(real), str(real), True))
        shown = [place for _, place, _ in self.image_mounts]
        links = {
            link: to for link, to in links.items() if not any(str(link).startswith(p + "/") for p in shown)
        }
        with tarfile.open(fileobj=io.BytesIO(root_tar(links))) as archive:
            archive.extractall(self.image, filter="fully_trusted")
        super().__init__(("127.0.0.1", 0), ClusterHandler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def write_kubeconfig(self, path: Path, token: str = TOKEN) -> Path:
        config = {
            "current-context": "here",
            "contexts": [
                {"name": "here", "context": {"cluster": "fake", "user": "me", "namespace": "jails"}}
            ],
            "clusters": [{"name": "fake", "cluster": {"server": self.address}}],
            "users": [{"name": "me", "user": {"token": token}}],
        }
        path.write_text(json.dumps(config))
        return path

    def __enter__(self) -> FakeCluster:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        self.cut_connections()
        for name in list(self.pods):
            self.remove(name)

    def remove(self, name: str) -> None:
        pod = self.pods.pop(name)
        pod.is_deleted = True
        for container in list(pod.containers.values()):
            container.kill()
            container.process.wait()
        remove_folder(pod.folder)  # it may be deeper than Python's recursion

    def is_isolated(self, pod: FakePod) -> bool:
        labels = pod.manifest["metadata"].get("labels") or {}
        return any(
            set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
            and not policy["spec"].get("ingress") and not policy["spec"].get("egress")
            and policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
            for policy in self.policies.values()
        )  # fmt: skip

    def confinement(self, pod: FakePod, name: str) -> Confinement:
        container = pod.spec_of(name)
        root = pod.folder / f"root-{uuid.uuid4().hex}"
        shutil.copytree(self.image, root, symlinks=True)
        mounts = list(self.image_mounts)
        for mount in container.get("volumeMounts") or []:
            source = pod.folder / "volumes" / mount["name"]
            if mount.get("subPath"):
                source /= mount["subPath"]
                if not source.exists():
                    source.mkdir(parents=True)
            mounts.append((str(source), mount["mountPath"], bool(mount.get("readOnly"))))
        security = {
            **(pod.manifest["spec"].get("securityContext") or {}),
            **(container.get("securityContext") or {}),
        }
        return Confinement(
            root=root,
            argv=container["command"],
            env={"PATH": os.defpath},
            working_directory="/",
            mounts=mounts,
            user=str(security.get("runAsUser", "")),
            has_network=not self.is_isolated(pod),
            is_root_read_only=bool(security.get("readOnlyRootFilesystem")),
            has_capabilities="ALL" not in ((security.get("capabilities") or {}).get("drop") or []),
            memory_bytes=int(((container.get("resources") or {}).get("limits") or {}).get("memory", 0)),
            hostname=pod.manifest["spec"].get("hostname", "fake"),
            is_first_process=True,
        )

    def live(self, pod: FakePod) -> None:
        """The kubelet: the init container, then the container, again and again."""
        for volume in pod.manifest["spec"]["volumes"]:
            place = pod.folder / "volumes" / volume["name"]
            place.mkdir(parents=True)
            place.chmod(0o777)
        stage = pod.manifest["spec"]["initContainers"][0]["name"]
        task = pod.manifest["spec"]["containers"][0]["name"]
        pod.containers[stage] = ContainerProcess(self.confinement(pod, stage), has_streams=False)
        while pod.containers[stage].first_pid() == 0 and pod.containers[stage].process.poll() is None:
            time.sleep(0.005)
        pod.status = {
            "phase": "Pending",
            "initContainerStatuses": [{"name": stage, "state": {"running": {}}}],
        }
        pod.containers[stage].wait()
        while not pod.is_deleted:
            container = pod.containers[task] = ContainerProcess(
                self.confinement(pod, task), has_streams=False
            )
            while container.first_pid() == 0 and container.process.poll() is None:
                time.sleep(0.005)
            if self.keeps_routes:
                enter = ["nsenter", "--target", str(container.first_pid()), "--net"]
                subprocess.run([*enter, str(base_python()), "-I", "-c", _ADD_ROUTE], check=True)
            pod.status = self._running(pod, task, {"running": {}})
            code = container.wait()
            if pod.is_deleted:
                return
            reason = "OOMKilled" if container.is_out_of_memory else "Error"
            pod.last_state = {"terminated": {"reason": reason, "exitCode": code}}
            pod.num_restarts += 1
            pod.status = self._running(
                pod, task, {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
            )
            time.sleep(0.1)

    @staticmethod
    def _running(pod: FakePod, task: str, state: dict[str, Any]) -> dict[str, Any]:
        status = {"name": task, "state": state, "restartCount": pod.num_restarts, "lastState": pod.last_state}
        return {"phase": "Running", "containerStatuses": [status]}


class ClusterHandler(FaultyHandler):
    server: FakeCluster

    def refuse(self, code: int, reason: str, message: str) -> None:
        self.say(
            code, {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}
        )

    def respond(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "Unauthorized", "Unauthorized")
            return
        words = [word for word in self.route.split("/") if word]
        match (self.command, words):
            case ("POST", [*_, "selfsubjectaccessreviews"]):
                asked = json.loads(self.data)["spec"]["resourceAttributes"]
                part = f"/{asked['subresource']}" if asked["subresource"] else ""
                is_named = f"{asked['verb']} {asked['resource']}{part}" in self.server.refused
                self.say(201, {"status": {"allowed": self.server.allowed and not is_named}})
            case (_, ["apis", "networking.k8s.io", "v1", "namespaces", "jails", "networkpolicies", *name]):
                self._policies(name)
            case ("GET", ["api", "v1", "namespaces", "jails", "pods"]):
                wanted = dict(pair.split("=") for pair in self.query.get("labelSelector", []))
                self.say(200, {"items": [p.described() for p in self.server.pods.values() if wanted.items() <= p.manifest["metadata"]["labels"].items()]})  # fmt: skip
            case ("POST", ["api", "v1", "namespaces", "jails", "pods"]):
                self._create()
            case (_, ["api", "v1", "namespaces", "jails", "pods", name, *verb]) if name in self.server.pods:
                self._of(self.server.pods[name], verb[0] if verb else self.command)
            case _:
                self.refuse(404, "NotFound", f"{self.route} not found")

    def _policies(self, name: list[str]) -> None:
        if self.command == "POST":
            body = json.loads(self.data)
            self.server.bodies.append(("policy", body))
            self.server.policies[body["metadata"]["name"]] = body
            self.say(201, body)
        elif name and name[0] in self.server.policies:
            self.say(200, self.server.policies[name[0]])
        else:
            self.refuse(404, "NotFound", "no such policy")

    def _create(self) -> None:
        manifest = json.loads(self.data)
        name = manifest["metadata"]["name"]
        self.server.bodies.append(("pod", manifest))
        if name in self.server.pods:
            self.refuse(409, "AlreadyExists", f'pods "{name}" already exists')
            return
        pod = FakePod(manifest, self.server.folder / name)
        pod.folder.mkdir()
        self.server.pods[name] = pod
        if self.server.freeze is not None:
            pod.status = self.server.freeze
        else:
            threading.Thread(target=self.server.live, args=(pod,), daemon=True).start()
        self.say(201, manifest)

    def _of(self, pod: FakePod, verb: str) -> None:
        match verb:
            case "GET":
                self.say(200, pod.described())
            case "DELETE":
                self.server.remove(pod.manifest["metadata"]["name"])
                self.say(200, pod.manifest)
            case "exec":
                self._exec(pod)
            case _:
                self.refuse(405, "MethodNotAllowed", "no")

    def _exec(self, pod: FakePod) -> None:
        container = pod.containers.get(self.query["container"][0])
        first = container.first_pid() if container else 0
        if not first:
            self.refuse(500, "InternalError", "container not found")
            return
        assert container is not None
        confinement = self.server.confinement(pod, self.query["container"][0])
        shutil.rmtree(confinement.root)
        channel = ServerSocket(self, self.server.protocols)
        enter = ["nsenter", "--target", str(first), "--mount", "--pid", "--ipc", "--uts", "--net", "--root"]
        spec = pod.spec_of(self.query["container"][0]).get("securityContext") or {}
        is_filtered = (spec.get("seccompProfile") or {}).get("type") == "RuntimeDefault"
        program = filter_program().hex() if is_filtered else ""
        process = subprocess.Popen(
            [*enter, *as_user(confinement), str(base_python()), "-I", "-S", "-c", _SECCOMP, program, *self.query["command"]],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": os.defpath}, start_new_session=True,
        )  # fmt: skip
        container.more_roots.add(process.pid)
        try:
            self._carry(channel, process)
        finally:
            container.more_roots.discard(process.pid)
            for pipe in (process.stdout, process.stderr):
                pipe.close()

    def _carry(self, channel: ServerSocket, process: subprocess.Popen[bytes]) -> None:
        fault = self.server.exec_fault

        def outward(number: int, source: Any) -> None:
            while chunk := source.read1(32768):
                if fault is None or not fault(self, channel, bytes([number]) + chunk):
                    channel.send(bytes([number]) + chunk)

        def inward() -> None:
            with suppress(OSError, ValueError):
                while (message := channel.receive()) is not None:
                    if message[:1] == b"\0":
                        process.stdin.write(message[1:])
                        process.stdin.flush()
            with suppress(OSError, ValueError):
                process.stdin.close()

        pairs = ((1, process.stdout), (2, process.stderr))
        threads = [threading.Thread(target=outward, args=pair, daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        threading.Thread(target=inward, daemon=True).start()
        code = process.wait()
        for thread in threads:
            thread.join()
        code = 128 - code if code < 0 else code
        cause = {"reason": "ExitCode", "message": str(code)}
        failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
        status = {"status": "Success"} if code == 0 else failed
        if fault is None or not fault(self, channel, b"\3" + json.dumps(status).encode()):
            channel.send(b"\3" + json.dumps(status).encode())
            channel.frame(8, (1000).to_bytes(2, "big"))
