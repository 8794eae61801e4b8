from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ordinary_user import AS_USER, python_of_all

from composer_replication.sandbox import process_memory, process_tree
from composer_replication.sandbox.keeper_process import end_keeper
from composer_replication.sandbox.process_memory import Mappings


def num_unlinked_bytes(pids: list[int]) -> int:
    return process_memory.unlinked_files(pids, Mappings.of(pids)).num_bytes


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said "up", killed at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", *words], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def test_descendants_with_and_without_help_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, time\nif os.fork() == 0: time.sleep(60)\nprint('up', flush=True); time.sleep(60)"
    with running(code) as process:
        (child,) = process_tree.descendants(process.pid)
        assert {process.pid, child} <= {*process_tree.descendants(os.getpid())}
        assert process_tree.descendants(child) == []
        with monkeypatch.context() as patched:
            patched.setattr(process_tree, "_PROC", Path("/nowhere"))
            assert process_tree.descendants(process.pid) == [child]
        assert process_tree.kill_descendants(process.pid)
        assert process.poll() is None


def test_a_keeper_that_was_killed_is_no_clean_end() -> None:
    """Its orphans have gone to somebody else, and nobody knows whether they live."""
    for command, is_clean in ((["true"], True), (["sh", "-c", "kill -9 $$"], False)):
        keeper = subprocess.Popen(command)
        keeper.wait()
        assert end_keeper(keeper) is is_clean


def test_a_process_that_is_gone_has_nothing() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert process_tree.descendants(gone.pid) == []
    assert process_memory.memory_bytes([gone.pid]) == 0
    assert num_unlinked_bytes([gone.pid]) == 0


def test_descriptors_on_their_way_in_a_socket_are_seen() -> None:
    code = (
        "import socket, sys, time\n"
        "one, two = socket.socketpair()\n"
        "socket.send_fds(one, [b'x'], [0])\n"
        "print('up', flush=True); sys.stdin.readline()\n"
        "socket.recv_fds(two, 1, 1)\n"
        "print('received', flush=True); time.sleep(60)"
    )
    with running(code) as process:
        assert process_memory.hides_descriptors([process.pid])
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "received\n"
        assert not process_memory.hides_descriptors([process.pid])


LOOK_AT_ENDED = """
import os, sys
for name, source in zip(("tree", "memory"), sys.stdin.read().split("\\0")):
    sys.modules[name] = type(sys)(name)
    exec(source, sys.modules[name].__dict__)
import memory, tree
if (child := os.fork()) == 0:
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
try:
    os.listdir(f"/proc/{child}/fd")
except PermissionError:
    print("closed", end=" ")
print(memory.hides_descriptors([child]), tree.speakers([child]))
"""


def test_an_ended_process_hides_nothing_from_an_ordinary_user() -> None:
    """Its list of files belongs to root from then on."""
    if not (python := python_of_all()):
        pytest.skip("no Python 3.11 here that an ordinary user may start")
    look = [*(AS_USER if os.geteuid() == 0 else []), python, "-c", LOOK_AT_ENDED]
    source = "\0".join(Path(module.__file__).read_text() for module in (process_tree, process_memory))
    found = subprocess.run(look, input=source, capture_output=True, text=True, check=True, cwd="/").stdout
    assert found == "closed False []\n"


def test_a_deleted_program_that_runs_counts(tmp_path: Path) -> None:
    program = tmp_path / "sleep"
    shutil.copy("/bin/sleep", program)
    with program.open("ab") as file:
        file.write(b"x" * (4 << 20))  # of no use to it, and never mapped
    with subprocess.Popen([str(program), "60"]) as process:
        try:
            assert num_unlinked_bytes([process.pid]) == 0
            program.unlink()
            assert num_unlinked_bytes([process.pid]) >= 4 << 20
        finally:
            process.kill()
