"""What a command may use: memory, disk, processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from composer_replication.interfaces import SandboxBackend
from composer_replication.records import Limits, SandboxSpec
from composer_replication.sandbox.conformance.programs import LONG_SECONDS, MIB, python


def test_memory_of_one_process(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=128 * MIB))) as sandbox:
        result = sandbox.exec(python("print(len(bytearray(300 << 20)))"), timeout_seconds=LONG_SECONDS)
        fits = sandbox.exec(python("print(len(bytearray(30 << 20)))"), timeout_seconds=LONG_SECONDS)
    assert result.exit_code != 0
    assert result.stdout == ""
    assert fits.stdout == f"{30 << 20}\n"


SIX_HOLD_MEMORY = (
    "import os, time\n"
    "for _ in range(6):\n"
    " if os.fork() == 0:\n"
    "  held = bytearray(60 << 20)\n"
    "  held[::4096] = b'x' * len(held[::4096])\n"
    "  time.sleep(30)\n"
    "time.sleep(30)"
)


def test_memory_of_all_processes_together(backend: SandboxBackend, tree: Path) -> None:
    code = SIX_HOLD_MEMORY
    with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=128 * MIB))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert result.out_of_memory
    assert not result.timed_out
    assert result.exit_code == 137


def test_memory_of_processes_whose_first_thread_has_ended(backend: SandboxBackend, tree: Path) -> None:
    """The kernel shows neither memory nor files of an ended thread, while others of its process live on."""
    code = (
        "import ctypes, os, threading, time\n"
        "def hold():\n"
        " time.sleep(0.2)\n"
        " held = bytearray(60 << 20)\n"
        " held[::4096] = b'x' * len(held[::4096])\n"
        " time.sleep(30)\n"
        "for _ in range(6):\n"
        " if os.fork() == 0:\n"
        "  threading.Thread(target=hold).start()\n"
        "  ctypes.CDLL(None).pthread_exit(None)\n"
        "time.sleep(30)"
    )
    with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=192 * MIB))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert result.out_of_memory, result.stderr
    assert not result.timed_out


def test_memory_of_processes_whose_names_tell_of_less(backend: SandboxBackend, tree: Path) -> None:
    """The kernel writes a name as it is into the lines that tell of memory, all ends of lines but one included."""
    for end in ("\\x0c", "\\r"):
        code = (
            f"import ctypes\nctypes.CDLL(None).prctl(15, b'{end}VmPTE:-999999', 0, 0, 0)\n" + SIX_HOLD_MEMORY
        )
        with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=128 * MIB))) as sandbox:
            result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
        assert result.out_of_memory, result.stderr
        assert not result.timed_out


def test_memory_that_forked_processes_share_counts_once(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import os, time\n"
        "held = bytearray(60 << 20)\n"
        "held[::4096] = b'x' * len(held[::4096])\n"
        "for _ in range(6):\n"
        " if os.fork() == 0:\n"
        "  time.sleep(0.5)\n"
        "  os._exit(0)\n"
        "time.sleep(0.5); print('lived')"
    )
    with backend.open(SandboxSpec(tree, limits=Limits(memory_bytes=128 * MIB))) as sandbox:
        assert sandbox.exec(python(code), timeout_seconds=LONG_SECONDS).stdout == "lived\n"


def test_disk_in_total(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import time\nfor n in range(40): open(f'f{n}', 'wb').write(b'x' << 20 if 0 else b'x' * (1 << 20))\n"
    )
    code += "time.sleep(30); print('lived')"
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert result.exit_code == 137
    assert "disk" in result.stderr
    assert not (result.timed_out or result.out_of_memory)


def test_disk_of_one_file(backend: SandboxBackend, tree: Path) -> None:
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        result = sandbox.exec(["sh", "-c", "head -c 50000000 /dev/zero > big"], timeout_seconds=LONG_SECONDS)
    assert result.exit_code != 0
    assert (tree / "big").stat().st_size <= 8 * MIB


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


def test_disk_of_files_that_are_deleted_and_only_mapped(backend: SandboxBackend, tree: Path) -> None:
    """Whatever they were called: no name ends a line of what the kernel tells of mappings."""
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        result = sandbox.exec(python(HIDDEN_IN_MAPPINGS), timeout_seconds=LONG_SECONDS)
    assert (result.exit_code, result.stdout) == (137, ""), result
    assert "disk" in result.stderr or "mapped files" in result.stderr
    assert not (result.timed_out or result.out_of_memory)


def test_mapped_files_that_are_deleted_and_can_be_measured_are_no_offence(
    backend: SandboxBackend, tree: Path
) -> None:
    """Locks of multiprocessing lie in ``/dev/shm``, deleted and mapped; Python's own mappings keep the file open."""
    code = (
        "import mmap, multiprocessing, os, time\n"
        "held = os.open('kept', os.O_CREAT | os.O_RDWR)\n"
        "os.write(held, bytes(1 << 20))\n"
        "kept = mmap.mmap(held, 4096)\n"
        "os.close(held)\n"
        "os.unlink('kept')\n"
        "try:\n"
        " locks = [multiprocessing.Lock() for _ in range(5)]\n"
        " shared = multiprocessing.get_context('fork').Array('i', 1000)\n"
        "except OSError: pass\n"
        "time.sleep(4)\n"
        "print('lived')"
    )
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert (result.exit_code, result.stdout) == (0, "lived\n"), result.stderr


def test_shared_memory_is_limited(backend: SandboxBackend, tree: Path) -> None:
    """Where it is a memory it is full, where it is a folder it is watched; it is never more than the disk."""
    code = (
        "import os, time\n"
        "for number in range(24): open(f'/dev/shm/{number}', 'wb').write(bytes(1 << 20))\n"
        "time.sleep(30); print('lived')"
    )
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert "lived" not in result.stdout
    assert not result.timed_out


def test_an_ended_child_that_nobody_waits_for_is_no_offence(backend: SandboxBackend, tree: Path) -> None:
    code = "import os, time\nif os.fork() == 0: os._exit(0)\ntime.sleep(1.5); print('lived')"
    with backend.open(SandboxSpec(tree)) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert (result.exit_code, result.stdout) == (0, "lived\n"), result.stderr


def test_ended_children_that_lost_their_parent_do_not_count(backend: SandboxBackend, tree: Path) -> None:
    command = "for n in $(seq 400); do (/bin/true &); done; echo lived"
    with backend.open(SandboxSpec(tree)) as sandbox:
        result = sandbox.exec(command, timeout_seconds=LONG_SECONDS)
    assert (result.exit_code, result.stdout) == (0, "lived\n"), result.stderr


def test_disk_that_was_there_before_is_not_charged(backend: SandboxBackend, tree: Path) -> None:
    (tree / "old").write_bytes(b"x" * (16 * MIB))
    with backend.open(SandboxSpec(tree, limits=Limits(disk_bytes=8 * MIB))) as sandbox:
        assert sandbox.exec(["sh", "-c", "echo new > small"], timeout_seconds=LONG_SECONDS).exit_code == 0


def test_paths_too_long_to_measure_count_as_over_the_limit(backend: SandboxBackend, tree: Path) -> None:
    code = "import os\nfor _ in range(60): os.mkdir('d' * 100); os.chdir('d' * 100)"
    sandbox = backend.open(SandboxSpec(tree))
    result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    sandbox.close()
    assert result.exit_code == 137
    assert "disk" in result.stderr
    subprocess.run(["rm", "-rf", str(tree)], check=True)


def test_processes_are_limited(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import os, time\nn = 1\ntry:\n"
        " while n < 60:\n  if os.fork() == 0: time.sleep(5); os._exit(0)\n  n += 1\n"
        "except OSError: pass\nprint(n)"
    )
    with backend.open(SandboxSpec(tree, limits=Limits(num_processes=20))) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert result.exit_code == 137 or 10 <= int(result.stdout) <= 20


def test_copies_are_made_without_the_kernel_where_it_refuses(backend: SandboxBackend, tree: Path) -> None:
    """A thread that waits in one of its copies would keep a file that no limit counts."""
    code = (
        "import os, shutil, socket\n"
        "open('from', 'wb').write(os.urandom(1 << 16) * 16)\n"
        "shutil.copyfile('from', 'to')\n"
        "ours, theirs = socket.socketpair()\n"
        "if os.fork() == 0:\n"
        " ours.sendfile(open('from', 'rb')); os._exit(0)\n"
        "ours.close()\n"
        "with theirs.makefile('rb') as stream: sent = stream.read()\n"
        "print(open('from', 'rb').read() == open('to', 'rb').read() == sent)"
    )
    with backend.open(SandboxSpec(tree)) as sandbox:
        result = sandbox.exec(python(code), timeout_seconds=LONG_SECONDS)
    assert (result.exit_code, result.stdout) == (0, "True\n"), result.stderr
