"""What is read of memory and of deleted files, where processes make what ``/proc`` tells strange or very long; to root the kernel tells more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import pytest
from ordinary_user import AS_USER, python_of_all

from composer_replication.records import Limits
from composer_replication.sandbox import process_memory
from composer_replication.sandbox.process_memory import Mappings, MapsTooLongError, lines_of_maps
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
        for is_exact in (False, True):
            assert 50 * MIB <= process_memory.memory_bytes([pid], is_exact=is_exact) < 150 * MIB


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


LOOK = """
import ctypes, json, os, socket, sys
sys.path.insert(0, ".")
from process_memory import Mappings, unlinked_files
library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
folder, case = sys.argv[1:]
name = os.path.join(folder, "file" if case != "name" else "file \\x0c\\x1c\\n0-1 r (deleted)")
held = os.open(name, os.O_CREAT | os.O_RDWR)
os.write(held, b"x" * (4 << 20))
assert library.mmap(None, ctypes.c_size_t(4096), 1, 1, held, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
other = os.open(name + "2", os.O_CREAT | os.O_RDWR)
kept = os.fork() if case == "open elsewhere" else 0
if case == "open elsewhere" and kept == 0:
    import signal
    signal.pause()
if case != "named":
    os.unlink(name)
if case == "same name":  # another file, small and open, that was called the same
    os.rename(name + "2", name)
    os.unlink(name)
else:
    os.unlink(name + "2")
    os.close(other)
if case not in ("open", "name"):
    os.close(held)
pids = [os.getpid(), *([kept] if kept else [])]
mappings = Mappings.of(pids, [folder] if case != "elsewhere" else [])
found = unlinked_files(pids, mappings, counted_device=os.stat(folder).st_dev if case == "counted" else None)
print(json.dumps([found.num_bytes, found.is_whole]))
if kept:
    os.kill(kept, 9)
"""


@pytest.fixture(params=["root", "user"])
def who(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "root" and os.geteuid() != 0:
        pytest.skip("we are an ordinary user")
    return name


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "process_memory.py").write_bytes(Path(process_memory.__file__).read_bytes())
        (folder / "process_memory.py").chmod(0o644)
        folder.chmod(0o777)
        yield folder


def look(folder: Path, who: str, case: str, place: str = "") -> list[object]:
    if not (python := python_of_all()):
        pytest.skip("no Python 3.11 here that an ordinary user may start")
    drop = AS_USER if who == "user" and os.geteuid() == 0 else ()
    command = [*drop, python, "-B", "-c", LOOK, place or str(folder), case]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", ["open", "open elsewhere", "name"])
def test_a_file_that_is_open_somewhere_counts_whole(folder: Path, who: str, case: str) -> None:
    assert look(folder, who, case) == [4 * MIB, True]


def test_a_file_that_has_a_name_is_not_our_affair(folder: Path, who: str) -> None:
    assert look(folder, who, "named") == [0, True]


@pytest.mark.parametrize("case", ["mapped", "same name"])
def test_a_file_that_is_only_mapped_is_known_to_root_and_named_to_others(
    folder: Path, who: str, case: str
) -> None:
    assert look(folder, who, case) == ([4 * MIB, True] if who == "root" else [4096, False])


def test_a_file_of_unknown_size_elsewhere_is_not_theirs(folder: Path, who: str) -> None:
    assert look(folder, who, "elsewhere") == ([4 * MIB, True] if who == "root" else [0, True])


def test_a_folder_has_two_names_where_a_link_leads_to_it(folder: Path) -> None:
    (folder / "real").mkdir()
    (folder / "real").chmod(0o777)
    (folder / "link").symlink_to("real")
    assert look(folder, "user", "mapped", str(folder / "link")) == [4096, False]


def test_what_somebody_else_counts_is_left_out(folder: Path) -> None:
    if os.geteuid() == 0:
        assert look(folder, "root", "counted") == [0, True]
