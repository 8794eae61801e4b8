from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from ordinary_user import AS_USER, python_of_all

from composer_replication.sandbox import process_memory, process_tree
from composer_replication.sandbox.keeper_process import end_keeper
from composer_replication.sandbox.process_memory import Mappings

CHILDREN = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n"
    " held = bytearray(50 << 20); held[::4096] = b'x' * len(held[::4096])\n"
    " f = os.memfd_create('x'); os.write(f, b'x' * (8 << 20))\n"
    " print(os.getpid(), flush=True); time.sleep(60)\n"
    "time.sleep(60)"
)


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


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([sys.executable, "-c", CHILDREN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process_tree.kill_descendants(process.pid)
            process.kill()


def test_descendants(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, child = parent
    assert process_tree.descendants(process.pid) == [child]
    assert process.pid in process_tree.descendants(os.getpid())
    assert process_tree.descendants(child) == []


def test_descendants_without_help_of_the_kernel(
    parent: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, child = parent
    monkeypatch.setattr(process_tree, "_PROC", Path("/nowhere"))
    assert process_tree.descendants(process.pid) == [child]


def test_memory_counts_what_is_touched(parent: tuple[subprocess.Popen[str], int]) -> None:
    _, child = parent
    assert 50 << 20 <= process_memory.memory_bytes([child]) < 150 << 20
    exact = process_memory.memory_bytes([child], is_exact=True)
    assert 50 << 20 <= exact <= process_memory.memory_bytes([child])


def test_unlinked_files_are_found_once(parent: tuple[subprocess.Popen[str], int]) -> None:
    _, child = parent
    assert num_unlinked_bytes([child, child]) == 8 << 20
    assert num_unlinked_bytes([]) == 0


def test_killing_reaches_all_below_and_not_the_root(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, child = parent
    assert process_tree.kill_descendants(process.pid)
    assert process.poll() is None
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


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


def test_threads_of_all_processes_count() -> None:
    code = (
        "import threading, time\n"
        "for _ in range(5): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('up', flush=True); time.sleep(60)"
    )
    with running(code) as process:
        assert process_memory.num_threads([process.pid]) == 6
        assert process_memory.num_threads([process.pid, 2**22 + 5]) == 6  # one that is gone


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root sees the descriptors of everybody")
def test_a_process_that_shows_its_descriptors_to_nobody_hides_them() -> None:
    code = (
        "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print('up', flush=True); time.sleep(60)"
    )
    with running(code) as process:
        assert process_memory.hides_descriptors([process.pid])


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


UNTOUCHED = """
import ctypes, mmap, os, sys, time
library = ctypes.CDLL(None)
held = os.memfd_create("x")
os.ftruncate(held, 40 << 20)
block = mmap.mmap(-1 if sys.argv[1] == "anonymous" else held, 40 << 20)
os.close(held)
block[::4096] = b"x" * len(block[::4096])
block.madvise(mmap.MADV_DONTNEED)
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel shows the files behind mappings to root alone")
@pytest.mark.parametrize("kind", ["anonymous", "memfd"])
def test_shared_memory_that_nobody_touches_at_the_moment_counts(kind: str) -> None:
    with running(UNTOUCHED, kind) as process:
        for is_exact in (False, True):
            count = partial(process_memory.memory_bytes, is_exact=is_exact)
            assert 40 << 20 <= count([process.pid]) < 140 << 20
            assert count([process.pid, process.pid]) - 40 * 2**20 < 100 << 20  # one block, seen twice


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


FIRST_THREAD_ENDED = """
import ctypes, os, threading, time
held = os.memfd_create("x"); os.write(held, b"x" * (8 << 20))
def work():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    block = bytearray(50 << 20); block[::4096] = b"x" * len(block[::4096])
    print("up", flush=True); time.sleep(60)
threading.Thread(target=work).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_lives_on_when_its_first_thread_has_ended() -> None:
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with running(start, FIRST_THREAD_ENDED) as parent:
        (process,) = process_tree.descendants(parent.pid)
        assert process_memory.memory_bytes([process]) == 0
        (speaker,) = threads = process_tree.speakers([process])
        assert speaker != process
        assert 50 << 20 <= process_memory.memory_bytes(threads) < 150 << 20
        assert process_memory.memory_bytes(threads, is_exact=True) >= 50 << 20
        assert num_unlinked_bytes(threads) == 8 << 20
        assert process_tree.kill_descendants(parent.pid)
        assert process_tree.speakers([process]) == []


def test_a_jail_whose_folder_is_gone_is_ended_and_no_other(tmp_path: Path) -> None:
    """Told by the name of the program and the folder that it was started with; others stay as they are."""
    prefix = f"{tmp_path}/scratch-"
    (tmp_path / "scratch-alive").mkdir()
    sleep = "import time; time.sleep(60)"

    def start(program: str, folder: str) -> subprocess.Popen[bytes]:
        words = [program, "-c", sleep, f"{prefix}{folder}/home"]
        return subprocess.Popen(words, executable=sys.executable)

    started = {name: start(*name) for name in [("bwrap", "gone"), ("bwrap", "alive"), ("other", "gone")]}
    try:
        deadline = time.monotonic() + 20
        while any(  # until then the copy of this process still has our own command line
            prefix.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            for process in started.values()
        ):
            assert time.monotonic() < deadline
        assert process_tree.end_jails_without_folder(prefix) == 1
        assert started["bwrap", "gone"].wait(timeout=20) == -signal.SIGKILL
        assert [started[name].poll() for name in [("bwrap", "alive"), ("other", "gone")]] == [None, None]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
