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


def test_memory_of_all_processes_together(backend: SandboxBackend, tree: Path) -> None:
    code = (
        "import os, time\n"
        "for _ in range(6):\n"
        " if os.fork() == 0:\n"
        "  held = bytearray(60 << 20)\n"
        "  held[::4096] = b'x' * len(held[::4096])\n"
        "  time.sleep(30)\n"
        "time.sleep(30)"
    )
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
