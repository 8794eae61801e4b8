"""A container engine over a real unix socket that really runs what it is asked to run."""

from __future__ import annotations

import io
import json
import shutil
import socketserver
import tarfile
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from container_process import Confinement, ContainerProcess, copy_root
from faulty_http import FaultyHandler, FaultyServer


@dataclass
class FakeContainer:
    name: str
    config: dict[str, Any]
    status: str = "created"
    exit_code: int = 0
    is_out_of_memory: bool = False
    process: ContainerProcess | None = None
    attached: Any = None
    done: threading.Event = field(default_factory=threading.Event)

    def described(self) -> dict[str, Any]:
        is_running = self.status == "running"
        pid = self.process.process.pid if self.process and is_running else 0
        return {
            "Id": self.name,
            "State": {
                "Status": self.status, "Running": is_running, "OOMKilled": self.is_out_of_memory,
                "ExitCode": self.exit_code, "Pid": pid, "Error": "",
            },
        }  # fmt: skip


class FakeEngine(FaultyServer, socketserver.UnixStreamServer):
    """Serve it with ``with``; ``images`` are folders by name."""

    def __init__(self, folder: Path) -> None:
        self.prepare()
        self.folder = folder
        self.socket_path = folder / "engine.sock"
        self.images: dict[str, Path] = {}
        self.containers: dict[str, FakeContainer] = {}
        self.security_options = ["name=seccomp,profile=builtin", "name=cgroupns"]
        self.api_version = "1.43"
        self.components = [{"Name": "Engine", "Version": "24.0.7"}]
        self.garble: Any = None
        super().__init__(str(self.socket_path), EngineHandler)

    def __enter__(self) -> FakeEngine:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.die()

    def die(self) -> None:
        """As a daemon that is killed without live-restore: nothing listens, everything is cut."""
        self.shutdown()
        self.server_close()
        with suppress(FileNotFoundError):
            self.socket_path.unlink()
        self.cut_connections()
        for container in list(self.containers.values()):
            if container.process is not None:
                container.process.kill()
                container.process.wait()

    def confinement(self, container: FakeContainer) -> Confinement:
        config, host = container.config, container.config["HostConfig"]
        root = copy_root(self.images[config["Image"]], self.folder / f"root-{container.name}")
        return Confinement(
            root=root,
            argv=[*(config.get("Entrypoint") or []), *(config.get("Cmd") or [])],
            env=dict(entry.split("=", 1) for entry in config.get("Env") or []),
            working_directory=config.get("WorkingDir") or "/",
            mounts=[
                (mount["Source"], mount["Target"], bool(mount.get("ReadOnly")))
                for mount in host.get("Mounts") or []
            ],
            user=config.get("User") or "",
            has_network=host.get("NetworkMode") != "none",
            is_root_read_only=bool(host.get("ReadonlyRootfs")),
            has_capabilities="ALL" not in (host.get("CapDrop") or []),
            memory_bytes=int(host.get("Memory") or 0),
            num_processes=max(0, int(host.get("PidsLimit") or 0) - 1),
            ulimits={entry["Name"]: entry["Hard"] for entry in host.get("Ulimits") or []},
            hostname=config.get("Hostname") or "fake",
        )


class EngineHandler(FaultyHandler):
    server: FakeEngine

    def respond(self) -> None:
        words = [word for word in self.route.split("/") if word]
        match (self.command, words):
            case ("GET", ["version"]):
                self.say(200, {"ApiVersion": self.server.api_version, "Components": self.server.components})
            case ("GET", ["info"]):
                self.say(200, {"SecurityOptions": self.server.security_options})
            case ("GET", ["images", *name, "json"]):
                known = "/".join(name) in self.server.images
                self.say(
                    *((200, {"Id": "x"}) if known else (404, {"message": f"No such image: {'/'.join(name)}"}))
                )
            case ("POST", ["images", "create"]):
                self._import()
            case ("POST", ["containers", "create"]):
                self._create()
            case ("GET", ["containers", "json"]):
                self._list()
            case (_, ["containers", name, *verb]) if name in self.server.containers:
                self._of(self.server.containers[name], verb[0] if verb else self.command)
            case _:
                self.say(404, {"message": f"No such container: {self.route}"})

    def _import(self) -> None:
        name = f"{self.query['repo'][0]}:{self.query['tag'][0]}"
        root = self.server.folder / f"image-{uuid.uuid4().hex}"
        with tarfile.open(fileobj=io.BytesIO(self.data)) as archive:
            archive.extractall(root, filter="fully_trusted")
        self.server.images[name] = root
        progress = json.dumps({"status": "sha256:0"}).encode() + b"\r\n"
        self.say_in_chunks(200, [progress[:7], progress[7:]])

    def _create(self) -> None:
        config = json.loads(self.data)
        if config["Image"] not in self.server.images:
            self.say(404, {"message": f"No such image: {config['Image']}"})
            return
        for mount in config["HostConfig"].get("Mounts") or []:
            if not Path(mount["Source"]).exists():
                text = f'invalid mount config for type "bind": bind source path does not exist: {mount["Source"]}'
                self.say(400, {"message": text})
                return
        container = FakeContainer(uuid.uuid4().hex, config)
        self.server.containers[container.name] = container
        self.server.bodies.append(("create", config))
        self.say(201, {"Id": container.name, "Warnings": []})

    def _list(self) -> None:
        wanted = json.loads(self.query.get("filters", ["{}"])[0]).get("label", [])
        self.say(
            200,
            [
                {"Id": container.name, "Labels": container.config["Labels"], "State": container.status}
                for container in self.server.containers.values()
                if all(label in container.config["Labels"] for label in wanted)
            ],
        )

    def _of(self, container: FakeContainer, verb: str) -> None:
        match verb:
            case "attach":
                self._attach(container)
            case "start":
                self._start(container)
            case "json":
                self.say(200, container.described())
            case "kill" if container.status == "running":
                assert container.process is not None
                container.process.kill()
                self.say(204)
            case "kill":
                self.say(409, {"message": f"container {container.name} is not running"})
            case "DELETE":
                self._remove(container)
            case _:
                self.say(404, {"message": "page not found"})

    def _remove(self, container: FakeContainer) -> None:
        if self.server.containers.pop(container.name, None) is None:  # somebody else is at it
            self.say(404, {"message": f"No such container: {container.name}"})
            return
        if container.status == "running":
            assert container.process is not None
            container.process.kill()
            container.done.wait(10)
        shutil.rmtree(self.server.folder / f"root-{container.name}", ignore_errors=True)
        self.say(204)

    def _attach(self, container: FakeContainer) -> None:
        self.close_connection = True
        container.attached = self
        self.wfile.write(
            b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.multiplexed-stream\r\n"
            b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        )
        container.done.wait(600)

    def _start(self, container: FakeContainer) -> None:
        if container.status != "created":
            self.say(304)
            return
        try:
            container.process = ContainerProcess(self.server.confinement(container))
        except OSError as error:
            self.say(500, {"message": f"OCI runtime create failed: {error}"})
            return
        container.status = "running"
        threading.Thread(target=_carry, args=(container, self.server.garble), daemon=True).start()
        self.say(204)


def _carry(container: FakeContainer, garble: Any) -> None:
    """The streams of one container, from its start to its end."""
    assert container.process is not None
    process, handler, lock = container.process.process, container.attached, threading.Lock()

    def outward(number: int, source: Any) -> None:
        while chunk := source.read1(32768):
            frame = bytes([number, 0, 0, 0]) + len(chunk).to_bytes(4, "big") + chunk
            with lock, suppress(OSError, ValueError):
                for piece in garble(handler, frame) if garble else [frame]:
                    handler.wfile.write(piece)

    def inward() -> None:
        with suppress(OSError, ValueError):
            while chunk := handler.rfile.read1(65536):
                process.stdin.write(chunk)
                process.stdin.flush()
        with suppress(OSError):
            process.stdin.close()

    threads = [threading.Thread(target=outward, args=pair, daemon=True) for pair in ((1, process.stdout), (2, process.stderr))]  # fmt: skip
    for thread in threads:
        thread.start()
    threading.Thread(target=inward, daemon=True).start()
    code = container.process.wait()
    for thread in threads:
        thread.join()
    process.stdout.close()
    process.stderr.close()
    with suppress(OSError):
        handler.connection.shutdown(2)
    container.is_out_of_memory = container.process.is_out_of_memory
    container.exit_code = 137 if container.is_out_of_memory else code
    container.status = "exited"
    container.done.set()
