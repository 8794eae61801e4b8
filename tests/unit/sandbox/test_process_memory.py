"""What is read of the memory of processes that make what ``/proc`` tells of them strange, or very long."""

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
from composer_replication.sandbox.process_memory import (
    Mappings,
    MapsTooLongError,
    lines_of_maps,
    unlinked_files,
)
from composer_replication.sandbox.process_tree import kill_descendants
from composer_replication.sandbox.supervised_run import Verdict, Watched

MIB = 1 << 20
NAMED = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)
held = bytearray(50 << 20); held[::4096] = b"x" * len(held[::4096])
print("up", flush=True); time.sleep(60)
"""
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


@pytest.mark.parametrize(
    "name", ["\rVmPTE:", "\rVmPTE: x", "\rVmPTE:-9999999", "\x0cVmPTE:-999999", "VmPTE: -9 kB"]
)
def test_a_process_tells_nothing_of_its_memory_by_its_name(name: str) -> None:
    with running(NAMED, name) as pid:
        for count in (process_memory.memory_bytes, process_memory.proportional_memory_bytes):
            assert 50 * MIB <= count([pid]) < 150 * MIB


def test_only_whole_numbers_of_kb_count(tmp_path: Path) -> None:
    told = tmp_path / "status"
    told.write_bytes(
        b"Name:\ta\rVmPTE: 1 kB\nVmPTE:\t-9 kB\nVmSwap:\nRssAnon:\t  12 kB\nThreads:\t3\nVmRSS: kB\n"
    )
    assert process_memory._fields(str(told)) == {b"RssAnon": 12 * 1024}
    assert process_memory._fields(str(tmp_path / "gone")) == {}


def test_maps_come_in_pieces_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "maps"
    told.write_bytes(b"".join(b"%d \r\x0c\x1c\n" % number for number in range(1000)))
    monkeypatch.setattr(process_memory, "_PIECE_BYTES", 100)
    pieces = list(lines_of_maps(str(told), inf))
    assert b"".join(pieces) == told.read_bytes()
    assert all(piece.endswith(b"\n") and len(piece) < 120 for piece in pieces)
    assert list(lines_of_maps(str(told), 0.0)) == []


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


def test_deleted_files_among_too_many_mappings_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(MAPPED) as pid:
        assert unlinked_files([pid]).is_whole
        monkeypatch.setattr(process_memory, "_MOST_MAPS_BYTES", 100 << 10)
        assert not unlinked_files([pid]).is_whole


DELETED = """
import mmap, os, sys, time
held = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.write(held, bytes(1 << 20))
block = mmap.mmap(held, 4096)
os.unlink(sys.argv[1])
print("up", flush=True); time.sleep(60)
"""


def test_who_has_mapped_a_deleted_file_is_known_from_one_look_at_the_mappings(tmp_path: Path) -> None:
    with running(DELETED, str(tmp_path / "file")) as pid, running(MAPPED) as other:
        found = Mappings.of([pid, other]).with_deleted
        assert found == {pid}
        assert unlinked_files([pid, other], (tmp_path,), mapping=found).num_bytes == MIB
