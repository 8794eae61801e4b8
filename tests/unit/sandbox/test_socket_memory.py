"""Sockets are asked through copies of their descriptors, and whoever owns them does not wait for it."""

from __future__ import annotations

import errno
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

from composer_replication.records import Limits
from composer_replication.sandbox import process_memory, process_tree, supervised_run
from composer_replication.sandbox.supervised_run import Watched

MIB = 1 << 20
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
FIRST_THREAD_ENDED = """
import ctypes, socket, threading, time
pair = socket.socketpair()
pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
pair[0].setblocking(False)
def work():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    sent = 0
    try:
        while True: sent += pair[0].send(bytes(65536))
    except BlockingIOError:
        print(sent, flush=True)
    time.sleep(60)
threading.Thread(target=work).start()
ctypes.CDLL(None).pthread_exit(None)
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


def test_a_descriptor_that_became_another_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(process_memory, "_sockets", lambda _: [(os.getpid(), file.fileno())])
        before = num_descriptors()
        found = process_memory.socket_memory([os.getpid()], room_bytes=0)
        assert found == process_memory.Counted(0, is_whole=True)
        assert num_descriptors() == before


def test_sockets_of_a_process_whose_first_thread_has_ended_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(FIRST_THREAD_ENDED) as (pid, sent):
        threads = process_tree.speakers([pid])
        assert threads not in ([], [pid])
        try:
            os.close(os.pidfd_open(threads[0], os.O_EXCL))
        except OSError:  # before Linux 6.9
            assert not process_memory.socket_memory(threads, room_bytes=0).is_whole
        else:
            assert process_memory.socket_memory(threads, room_bytes=0).num_bytes >= sent >= MIB // 8

        def refuse(thread: int, flags: int = 0) -> int:
            raise OSError(errno.EINVAL, "an older kernel")

        monkeypatch.setattr(os, "pidfd_open", refuse)
        assert not process_memory.socket_memory(threads, room_bytes=0).is_whole
        assert process_memory.socket_memory(
            threads, room_bytes=1 << 40
        ).is_whole  # they are too few to matter


def test_what_nobody_can_measure_ends_the_run_after_five_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_run, "_SECONDS_UNTIL_HIDING", 0.0)
    watched = Watched(Limits(), (tmp_path,), 0)
    assert [watched.are_hiding(are_hidden=True) for _ in range(5)] == [False] * 4 + [True]
    assert not watched.are_hiding(are_hidden=False)


def test_without_a_process_to_close_them_sockets_are_closed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    before = num_descriptors()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    process_memory._let_go([os.dup(0)])
    assert num_descriptors() == before
