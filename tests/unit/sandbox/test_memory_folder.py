"""Shared memory that is a memory of its own: where it stands among the mounts, and what tells that it was touched."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.records import SandboxSpec
from composer_replication.sandbox.bwrap_program import find_bwrap, require_bwrap
from composer_replication.sandbox.folders import MemoryFolder, size_for
from composer_replication.sandbox.host_paths import MountPlan
from composer_replication.sandbox.process_folder import Scratch

MIB = 1 << 20


def test_it_is_as_large_as_the_smaller_limit() -> None:
    assert size_for(memory_bytes=8 * MIB, disk_bytes=3 * MIB) == 3 * MIB
    assert size_for(memory_bytes=2 * MIB, disk_bytes=3 * MIB) == 2 * MIB
    assert size_for(memory_bytes=2 * MIB, disk_bytes=0) > 0  # bwrap takes no size of nothing


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")
def test_what_lies_below_it_comes_after_it() -> None:
    """A tree there, and a link to one elsewhere: both keep their names inside."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, tempfile.TemporaryDirectory() as elsewhere:
        tree, link = Path(place) / "tree", Path(place) / "link"
        tree.mkdir()
        link.symlink_to(elsewhere)
        scratch = Scratch()
        try:
            plan = MountPlan(SandboxSpec(tree, read_only=(link,)), scratch, shared_memory_bytes=MIB)
            with scratch.for_one_command(None) as fresh:
                words = plan.arguments(fresh)
                assert list((fresh / "shm").iterdir()) == []
        finally:
            scratch.remove()
    at = words.index("--tmpfs")
    assert words[at + 1] == "/dev/shm"
    assert words[at - 2 : at] == ["--size", str(MIB)]
    assert words.index(str(tree)) > at
    assert words[words.index(str(link)) - 2 : words.index(str(link))] == ["--symlink", elsewhere]
    assert words.index(str(link)) > at


@pytest.mark.parametrize(
    "touch",
    [
        lambda folder: (folder / "left").touch(),
        lambda folder: folder.chmod(0o711),
        lambda folder: os.setxattr(folder, "user.left", b"x"),
    ],
)
def test_what_was_touched_is_not_given_to_the_next_command(
    tmp_path: Path, touch: Callable[[Path], None]
) -> None:
    folder = MemoryFolder(os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY))
    try:
        assert folder.is_untouched()
        try:
            touch(tmp_path)
        except OSError:
            pytest.skip("this file system has no attributes")
        assert not folder.is_untouched()
    finally:
        folder.close()


def test_one_that_went_with_its_jail_holds_nothing_and_is_not_what_it_was(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    folder = MemoryFolder(descriptor)
    folder.close()
    taken = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)  # the number is another file's by now
    try:
        assert taken == descriptor
        assert (folder.used_bytes(), folder.is_untouched()) == (0, False)
        folder.close()
        os.fstat(taken)
    finally:
        os.close(taken)


@pytest.mark.skipif(find_bwrap() is None, reason="bwrap is not here")
def test_deleted_files_in_it_are_told_to_the_byte() -> None:
    code = (
        "import os, sys\nheld = os.open('/dev/shm/x', os.O_CREAT | os.O_RDWR)\nos.unlink('/dev/shm/x')\n"
        "os.write(held, bytes(3 << 20))\nprint(os.getpid(), flush=True)\nsys.stdin.readline()"
    )
    command = [require_bwrap(), "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/dev/shm"]
    command += ["python3", "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        said = process.stdout.readline()
        if not said:
            pytest.skip("bwrap cannot start a jail here")
        held = MemoryFolder(os.open(f"/proc/{said.strip()}/root/dev/shm", os.O_RDONLY | os.O_DIRECTORY))
        assert held.used_bytes() == 3 * MIB
        process.stdin.write("\n")
    assert held.used_bytes() == 0
    held.close()
