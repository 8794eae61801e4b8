"""What is counted of deleted files, as root and as an ordinary user: the kernel tells them different things."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.sandbox import base_python, process_memory

MIB = 1 << 20
AS_USER = ["setpriv", "--reuid", "64123", "--regid", "64123", "--clear-groups"]
LOOK = """
import ctypes, json, os, socket, sys
sys.path.insert(0, ".")
from process_memory import unlinked_files
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
asked = {"pids": [os.getpid(), *([kept] if kept else [])]}
if case != "elsewhere":
    asked["folders"] = [folder]
if case == "counted":
    asked["counted_device"] = os.stat(folder).st_dev
found = unlinked_files(**asked)
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
    drop = AS_USER if who == "user" and os.geteuid() == 0 else []
    candidates = (sys.executable, str(base_python()), "/usr/bin/python3")
    ask = "import sys; sys.exit(sys.version_info < (3, 11))"
    python = next((p for p in candidates if subprocess.run([*drop, p, "-c", ask], cwd="/", check=False, capture_output=True).returncode == 0), None)  # fmt: skip
    if python is None:
        pytest.skip("no Python 3.11 here that an ordinary user may start")
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
