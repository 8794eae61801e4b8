"""What is read of memory and of deleted files, where processes make what ``/proc`` tells strange or very long; to root the kernel tells more."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import pytest

from composer_replication.records import Limits
from composer_replication.sandbox import process_memory
from composer_replication.sandbox.process_memory import Mappings, MapsTooLongError, lines_of_maps
from composer_replication.sandbox.process_tree import kill_descendants
from composer_replication.sandbox.supervised_run import Verdict, Watched

MIB = 1 << 20
NUM_MAPPINGS = 20_000
MAPPED = f"""
import ctypes, time
library = ctypes.CDLL(None, use_errno=True)
library.mmap.restype = ctypes.c_void_p
at = library.mmap(None, ctypes.c_size_t({NUM_MAPPINGS} * 4096), 0, 0x22, -1, ctypes.c_long(0))
for number in range(0, {NUM_MAPPINGS}, 2):
    assert library.mprotect(ctypes.c_void_p(at + number * 4096), ctypes.c_size_t(4096), 1) == 0
print("up", flush=True); time.sleep(60)
"""


@contextmanager
def running(code: str, *words: str) -> Iterator[int]:
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process.pid
        finally:
            process.kill()


def test_only_whole_numbers_of_kb_count(tmp_path: Path) -> None:
    told = tmp_path / "status"
    told.write_bytes(
        b"Name:\ta\rVmPTE: 1 kB\nVmPTE:\t-9 kB\nVmSwap:\nRssAnon:\t  12 kB\nThreads:\t3\nVmRSS: kB\n"
    )
    assert process_memory._fields(str(told)) == {b"RssAnon": 12 * 1024}
    assert process_memory._fields(str(tmp_path / "gone")) == {}


@pytest.mark.parametrize("limit", ["_MOST_MAPS_BYTES", "_LONGEST_LINE_BYTES"])
def test_maps_that_are_too_long_are_not_read_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    told = tmp_path / "maps"
    told.write_bytes(b"x" * (1 << 18) + b"\n")
    assert len(list(lines_of_maps(str(told), inf))) == 1
    monkeypatch.setattr(process_memory, limit, 1 << 17)
    with pytest.raises(MapsTooLongError):
        list(lines_of_maps(str(told), inf))


def test_mappings_cost_memory() -> None:
    with running(MAPPED) as pid:
        found = Mappings.of([pid])
        assert NUM_MAPPINGS < found.num_mappings < NUM_MAPPINGS + 1000
        assert process_memory.memory_bytes([pid]) > found.kernel_bytes > 4 * MIB
        some = Mappings.of([pid, pid], enough_bytes=MIB)
        assert MIB < some.kernel_bytes < 2 * MIB
        assert Mappings.of([pid], deadline=0.0).num_mappings == 0


def test_a_run_with_more_mappings_than_memory_is_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"

    def verdict(memory_bytes: int) -> Verdict:
        return Watched(Limits(memory_bytes=memory_bytes), (tmp_path,), 0).look(pid, time.monotonic() + 60)

    with running(parent, MAPPED) as pid:
        assert verdict(512 * MIB) is Verdict.ENDED
        assert verdict(4 * MIB) is Verdict.OVER_MEMORY
        monkeypatch.setattr(process_memory, "_MOST_MAPS_BYTES", 100 << 10)
        assert verdict(512 * MIB) is Verdict.OVER_MEMORY
        assert kill_descendants(pid)


ZOMBIES = """
import os, time
for _ in range(100):
    if os.fork() == 0: os._exit(0)
print("up", flush=True); time.sleep(60)
"""


def test_ended_processes_that_nobody_waits_for_are_bounded(tmp_path: Path) -> None:
    """Without a process namespace they fill the machine's own list."""
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with running(parent, ZOMBIES) as pid:
        found = [Watched(Limits(num_processes=most), (tmp_path,), 0).look(pid) for most in (20, 64)]
        assert found == [Verdict.OVER_PROCESSES, Verdict.ENDED]
        assert kill_descendants(pid)
