"""Sockets are asked through copies of their descriptors, and whoever owns them does not wait for it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from composer_replication.sandbox import process_memory

SENDER = """
import socket, sys, time
held = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
held.setblocking(False)
sent = 0
try:
    while True: sent += held.send(bytes(65536))
except BlockingIOError:
    print(sent, flush=True)
time.sleep(60)
"""


@contextmanager
def running(code: str, *words: str) -> Iterator[tuple[int, int]]:
    """A process, and how much it has sent that nobody reads."""
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_tcp_has_queued_counts(listener: socket.socket) -> None:
    before = num_descriptors()
    with running(SENDER, str(listener.getsockname()[1])) as (pid, sent):
        taken, _ = listener.accept()
        with taken:
            received = int.from_bytes(fcntl.ioctl(taken, termios.FIONREAD, bytes(4)), "little")
            found = process_memory.socket_memory([pid], room_bytes=0)
    assert found.is_whole
    assert found.num_bytes >= sent - received > 0
    assert num_descriptors() == before


def test_nobody_waits_where_the_owner_of_a_lingering_socket_ends_as_it_is_asked(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger = SENDER.replace(
        "sent = 0", "held.setsockopt(1, socket.SO_LINGER, bytes.fromhex(sys.argv[2]))\nsent = 0"
    )
    asked = process_memory._asked
    answers: list[process_memory.Counted] = []

    def end_owner(copy: socket.socket, *, is_unix: bool) -> tuple[int, int]:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return asked(copy, is_unix=is_unix)

    def look() -> None:
        answers.append(process_memory.socket_memory([pid], room_bytes=0))

    monkeypatch.setattr(process_memory, "_asked", end_owner)
    words = (str(listener.getsockname()[1]), struct.pack("ii", 1, 600).hex())
    with running(linger, *words) as (pid, _):
        taken, _ = listener.accept()
        with taken:
            thread = threading.Thread(target=look, daemon=True)
            thread.start()
            thread.join(30)
            assert answers and answers[0].num_bytes > 0
