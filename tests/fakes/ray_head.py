"""A real Ray of our own on this machine: a head that knows no cache, with a token that nobody else has."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

START_TRIES = 4  # Ray gives each start 30 s, which a busy machine may not


@dataclass(frozen=True)
class RayHead:
    """Its nodes know no cache and have a temporary folder of their own; ``token`` is what a driver needs to join."""

    address: str
    token: dict[str, str]
    variables: dict[str, str]
    cache: Path
    scratch: Path
    session: int


@contextmanager
def running_ray(root: Path, *, num_cpus: int = 1, **more: str) -> Iterator[RayHead]:
    """Variables of its workers are ``more``. Afterwards no process of it is left."""
    (root / "scratch").mkdir()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ours = {
        **token,
        "COMPOSER_RL_CACHE": str(root / "cache"),
        "TMPDIR": str(root / "scratch"),
        "RAY_agent_register_timeout_ms": "600000",
        "RAY_worker_niceness": "0",  # by Ray's own 15 a busy machine gives workers next to nothing
        **more,
    }
    with tempfile.TemporaryDirectory(
        prefix="ray-", dir="/tmp"
    ) as name:  # the paths of its sockets must be short
        folder = Path(name)
        head, port = start_head(folder, ours, root / "log", num_cpus)
        try:
            yield RayHead(f"127.0.0.1:{port}", token, ours, root / "cache", root / "scratch", head.pid)
        finally:
            stop(head, folder)
    assert descendants_of(head.pid, folder) == []


def processes() -> Iterator[tuple[int, str]]:
    """All of this machine that live, with their command line."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if words:
                yield int(entry.name), words.replace(b"\0", b" ").decode(errors="replace")


def actors_of(session: int) -> list[int]:
    """Processes of our actors on the node of this session."""
    found = []
    for pid, words in processes():
        with suppress(ProcessLookupError):
            if words.startswith("ray::RolloutActor") and os.getsid(pid) == session:
                found.append(pid)
    return found


def free_port() -> int:
    """Below those that outgoing connections get, so that none takes it meanwhile; the next one is free as well."""
    while True:
        port = 20_000 + 2 * secrets.randbelow(6_000)  # ``random`` draws the same in all workers
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


def start_head(
    folder: Path, environment: dict[str, str], log: Path, num_cpus: int
) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(START_TRIES):
        port = free_port()
        words = [
            "--head", f"--port={port}", f"--ray-client-server-port={free_port()}", f"--temp-dir={folder}",
            "--include-dashboard=false", "--no-monitor", f"--num-cpus={num_cpus}",
        ]  # fmt: skip
        head = start_ray(words, environment, log)
        if head.poll() is None:
            return head, port
        stop(head, folder)
    raise AssertionError(log.read_text())


def start_ray(words: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A node with one processor, in a session of its own; it has ended where it could not be started."""
    with log.open("ab") as file:
        node = subprocess.Popen(
            [
                sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=1",
                "--num-gpus=0", "--object-store-memory=100000000", "--include-log-monitor=false",
                "--min-worker-port=0", "--max-worker-port=0", *words,
            ],
            env={**os.environ, **environment}, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    while node.poll() is None and b"Ray runtime started" not in log.read_bytes():
        time.sleep(0.1)
    return node


@contextmanager
def further_node(head: RayHead, root: Path, resources: str) -> Iterator[int]:
    """A node besides the head with a cache and a temporary folder of its own; its session."""
    (root / "scratch").mkdir(parents=True)
    ours = {**head.variables, "COMPOSER_RL_CACHE": str(root / "cache"), "TMPDIR": str(root / "scratch")}
    words = [f"--address={head.address}", f"--resources={resources}"]
    for number in range(START_TRIES):
        log = root / f"log-{number}"
        node = start_ray(words, ours, log)
        if node.poll() is None:
            break
    else:
        raise AssertionError(log.read_text())
    try:
        yield node.pid
    finally:
        kill_session(node.pid)
        node.wait()


def kill_session(session: int) -> None:
    """End every process of a node at once, as if its machine were gone."""
    for _ in range(100):
        left = []
        for pid, _ in processes():
            with suppress(ProcessLookupError):
                if os.getsid(pid) == session:
                    left.append(pid)
                    os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


def stop(head: subprocess.Popen[bytes], folder: Path) -> None:
    """End the head, then whatever still names its folder or is of its session."""
    head.terminate()
    with suppress(subprocess.TimeoutExpired):
        head.wait(60)
    for _ in range(100):
        left = [pid for pid in descendants_of(head.pid, folder) if pid != os.getpid()]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.1)
    head.wait()


def descendants_of(session: int, folder: Path) -> list[int]:
    found = []
    for pid, words in processes():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session or str(folder) in words:
                found.append(pid)
    return found
