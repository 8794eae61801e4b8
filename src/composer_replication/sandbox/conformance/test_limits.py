"""What a command may use: memory, disk, processes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox import SandboxBackend
from composer_replication.sandbox.conformance.plugin import MIB, python, run, run_limited


def test_memory_of_one_process(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=128 * MIB))) as sandbox:
        result = run(sandbox, python("print(len(bytearray(300 << 20)))"))
        fits = run(sandbox, python("print(len(bytearray(30 << 20)))"))
    assert result.exit_code != 0
    assert result.stdout == ""
    assert fits.stdout == f"{30 << 20}\n"


SIX_HOLD_MEMORY = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(60 << 20)
        held[::4096] = b'x' * len(held[::4096])
        time.sleep(30)
time.sleep(30)
"""
# The kernel shows neither memory nor files of an ended thread, while others of its process live on.
FIRST_THREADS_ENDED = """
import ctypes, os, threading, time
def hold():
    time.sleep(0.2)
    held = bytearray(60 << 20)
    held[::4096] = b'x' * len(held[::4096])
    time.sleep(30)
for _ in range(6):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).pthread_exit(None)
time.sleep(30)
"""


def _called(name: str) -> str:
    """The kernel writes a name as it is into the lines that tell of memory, all ends of lines but one included."""
    return f"import ctypes\nctypes.CDLL(None).prctl(15, b'{name}VmPTE:-999999', 0, 0, 0)\n{SIX_HOLD_MEMORY}"


FORTY_FILES = "import time\nfor n in range(40): open(f'f{n}', 'wb').write(bytes(1 << 20))\ntime.sleep(30)"
# Whatever they were called: no name ends a line of what the kernel tells of mappings.
HIDDEN_IN_MAPPINGS = """
import ctypes, os, time
library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
for number in range(20):
    name = f'bomb {number} \\x0c\\x1c\\n0-1 r 0 0:0 1 x (deleted)'
    held = os.open(name, os.O_CREAT | os.O_RDWR)
    os.unlink(name)
    os.write(held, bytes(1 << 20))
    page = library.mmap(None, ctypes.c_size_t(4096), 1, 1, held, ctypes.c_long(0))
    assert page != ctypes.c_void_p(-1).value
    os.close(held)
time.sleep(30)
print('lived')
"""
TOO_LONG_TO_MEASURE = "import os\nfor _ in range(60): os.mkdir('d' * 100); os.chdir('d' * 100)"


@pytest.mark.parametrize(
    ("code", "limits", "named"),
    [
        pytest.param(SIX_HOLD_MEMORY, {"memory_bytes": 128 * MIB}, "memory", id="memory of all together"),
        pytest.param(FIRST_THREADS_ENDED, {"memory_bytes": 192 * MIB}, "memory", id="first threads ended"),
        pytest.param(_called("\\x0c"), {"memory_bytes": 128 * MIB}, "memory", id="name with a form feed"),
        pytest.param(_called("\\r"), {"memory_bytes": 128 * MIB}, "memory", id="name with a return"),
        pytest.param(FORTY_FILES, {"disk_bytes": 8 * MIB}, "disk", id="disk in total"),
        pytest.param(
            HIDDEN_IN_MAPPINGS, {"disk_bytes": 8 * MIB}, "disk|mapped files", id="only mapped files"
        ),
        pytest.param(TOO_LONG_TO_MEASURE, {}, "disk", id="paths too long to measure"),
    ],
)
def test_what_is_over_a_limit_is_ended(
    backend: SandboxBackend, tree: Path, code: str, limits: dict[str, int], named: str
) -> None:
    result = run_limited(backend, tree, python(code), **limits)
    assert (result.exit_code, result.stdout) == (137, ""), result
    assert re.search(named, result.stderr), result
    assert (result.timed_out, result.out_of_memory) == (False, named == "memory")
    subprocess.run(["rm", "-rf", str(tree)], check=True)  # some are too deep for whoever comes next


def test_disk_of_one_file(backend: SandboxBackend, tree: Path) -> None:
    result = run_limited(backend, tree, "head -c 50000000 /dev/zero > big", disk_bytes=8 * MIB)
    assert result.exit_code != 0
    assert (tree / "big").stat().st_size <= 8 * MIB


def test_shared_memory_is_limited(backend: SandboxBackend, tree: Path) -> None:
    """Where it is a memory it is full, where it is a folder it is watched; it is never more than the disk."""
    code = (
        "import os, time\n"
        "for number in range(24): open(f'/dev/shm/{number}', 'wb').write(bytes(1 << 20))\n"
        "time.sleep(30); print('lived')"
    )
    result = run_limited(backend, tree, python(code), disk_bytes=8 * MIB)
    assert "lived" not in result.stdout
    assert not result.timed_out


def test_processes_are_limited(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import os, time\nn = 1\ntry:\n"
        " while n < 60:\n  if os.fork() == 0: time.sleep(5); os._exit(0)\n  n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    result = run_limited(backend, tree, python(code), num_processes=20)
    assert result.exit_code == 137 or 10 <= int(result.stdout) <= 20


def test_disk_that_was_there_before_is_not_charged(backend: SandboxBackend, tree: Path) -> None:
    (tree / "old").write_bytes(b"x" * (16 * MIB))
    assert run_limited(backend, tree, "echo new > small", disk_bytes=8 * MIB).exit_code == 0


SHARED_BY_FORKS = """
import os, time
held = bytearray(60 << 20)
held[::4096] = b'x' * len(held[::4096])
for _ in range(6):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
time.sleep(0.5); print('lived')
"""
# Locks of multiprocessing lie in /dev/shm, deleted and mapped; Python's own mappings keep the file open.
MAPPED_AND_MEASURED = """
import mmap, multiprocessing, os, time
held = os.open('kept', os.O_CREAT | os.O_RDWR)
os.write(held, bytes(1 << 20))
kept = mmap.mmap(held, 4096)
os.close(held)
os.unlink('kept')
try:
    locks = [multiprocessing.Lock() for _ in range(5)]
    shared = multiprocessing.get_context('fork').Array('i', 1000)
except OSError: pass
time.sleep(4)
print('lived')
"""
# A thread that waits in a copy by the kernel would keep a file that no limit counts.
COPIES_WITHOUT_THE_KERNEL = """
import os, shutil, socket
open('from', 'wb').write(os.urandom(1 << 16) * 16)
shutil.copyfile('from', 'to')
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.sendfile(open('from', 'rb')); os._exit(0)
ours.close()
with theirs.makefile('rb') as stream: sent = stream.read()
if open('from', 'rb').read() == open('to', 'rb').read() == sent: print('lived')
"""
ENDED_CHILD = "import os, time\nif os.fork() == 0: os._exit(0)\ntime.sleep(1.5); print('lived')"


@pytest.mark.parametrize(
    ("command", "limits"),
    [
        pytest.param(python(SHARED_BY_FORKS), {"memory_bytes": 128 * MIB}, id="memory shared by forks"),
        pytest.param(python(MAPPED_AND_MEASURED), {"disk_bytes": 8 * MIB}, id="deleted, mapped, measured"),
        pytest.param(python(COPIES_WITHOUT_THE_KERNEL), {}, id="copies that the kernel refuses"),
        pytest.param(python(ENDED_CHILD), {}, id="a child that nobody waits for"),
        pytest.param(
            "for n in $(seq 400); do (/bin/true &); done; echo lived", {}, id="children without parent"
        ),
    ],
)
def test_what_is_no_offence(
    backend: SandboxBackend, tree: Path, command: list[str] | str, limits: dict[str, int]
) -> None:
    result = run_limited(backend, tree, command, **limits)
    assert (result.exit_code, result.stdout) == (0, "lived\n"), result.stderr
