"""Calls made for a command, here for this very process: beside the kernel's own answers, and outside."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import pytest

from composer_replication.sandbox.file_changes import FileChanges, call_numbers

HERE = -100
NOW, OMIT = (1 << 30) - 1, (1 << 30) - 2
NUMBERS = {name: number for number, name in call_numbers().items()}
LIBRARY = ctypes.CDLL(None, use_errno=True)
KEPT: list[object] = []  # memory whose address was given away

pytestmark = pytest.mark.skipif(not NUMBERS, reason="the numbers of this machine's calls are not known")


@dataclass(frozen=True)
class OurCall:
    """A call as the supervisor sees it, of this process."""

    args: tuple[int, ...]
    pid: int = os.getpid()

    def read(self, addr: int, length: int) -> bytes | None:
        buffer = ctypes.create_string_buffer(length)
        there, here = ((ctypes.c_size_t * 2)(place, length) for place in (addr, ctypes.addressof(buffer)))
        size = LIBRARY.process_vm_readv(
            self.pid, here, ctypes.c_ulong(1), there, ctypes.c_ulong(1), ctypes.c_ulong(0)
        )
        return buffer.raw if size == length else None

    def write(self, addr: int, data: bytes) -> bool:
        ctypes.memmove(addr, data, len(data))
        return True


def held(data: bytes) -> int:
    """The address of these bytes."""
    KEPT.append(ctypes.create_string_buffer(data, max(1, len(data))))
    return ctypes.addressof(KEPT[-1])


def words(values: tuple[object, ...]) -> tuple[int, ...]:
    """Six arguments as the kernel sees them; bytes become their address."""
    found = [held(value) if isinstance(value, bytes) else int(str(value)) & (1 << 64) - 1 for value in values]
    return (*found, *[0] * (6 - len(found)))


def by_kernel(name: str, values: tuple[object, ...]) -> int:
    result = LIBRARY.syscall(ctypes.c_long(NUMBERS[name]), *(ctypes.c_long(word) for word in words(values)))
    return result if result >= 0 else -ctypes.get_errno()


def by_us(name: str, values: tuple[object, ...], *writable: Path) -> int:
    changes = FileChanges([str(path) for path in writable], [], [])
    try:
        return changes.answer(name, OurCall(words(values)))
    except OSError as error:
        return -(error.errno or 0)


def times(*numbers: int) -> bytes:
    return struct.pack(f"={len(numbers)}q", *numbers)


def planted(folder: Path) -> dict[str, int]:
    """A small world; its opened file and folder."""
    folder.mkdir()
    (folder / "file").write_text("x")
    os.utime(folder / "file", (5, 6))
    (folder / "sub").mkdir()
    (folder / "link").symlink_to("file")
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    return {"fd": os.open(folder / "file", os.O_RDONLY), "dir": os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}


def facts(folder: Path) -> list[tuple[str, int, int, int, float, float]]:
    """Mode, owner and set times of all there is."""
    found = []
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        read, written = (when if when < 1e9 else 0.0 for when in (info.st_atime, info.st_mtime))
        found.append((path.name, info.st_mode, info.st_uid, info.st_gid, read, written))
    return found


OURS = (os.getuid(), os.getgid())
CASES: list[tuple[str, tuple[object, ...]]] = [
    ("chmod", (b"{}/file\0", 0o640)),
    ("chmod", (b"{}/link\0", 0o2711)),
    ("chmod", (b"{}/sub/../pipe\0", 0o600)),
    *[("chmod", (b"{}/" + name + b"\0", 0o600)) for name in (b"none", b"file/x", b"loop", b"dangling", b"n" * 300)],
    ("chmod", (b"\0", 0o600)),
    ("chmod", (b"{}/" + b"./" * 2100 + b"file\0", 0o600)),
    ("chmod", (0, 0o600)),
    ("fchmod", ("fd", 0o604)),
    ("fchmod", (987654, 0o604)),
    ("fchmod", (-1, 0o604)),
    ("fchmodat", ("dir", b"link\0", 0o444)),
    ("fchmodat", ("fd", b"link\0", 0o444)),
    ("fchmodat", (987654, b"link\0", 0o444)),
    ("fchmodat", (HERE, b"{}/sub\0", 0o755)),
    ("fchmodat2", ("dir", b"link\0", 0o444, 0x100)),
    ("fchmodat2", ("fd", b"\0", 0o444, 0x1000)),
    ("fchmodat2", ("dir", b"file\0", 0o444, 0x2)),
    ("utimensat", ("dir", b"link\0", times(1, 2, 3, 4), 0x100)),
    ("utimensat", ("dir", b"link\0", times(1, 2, 3, 4), 0)),
    ("utimensat", ("fd", 0, times(1, OMIT, 3, 4), 0)),
    ("utimensat", ("fd", 0, times(1, NOW, 3, NOW), 0)),
    ("utimensat", ("fd", 0, 0, 0)),
    ("utimensat", ("fd", 0, times(1, 2, 3, 4), 0x100)),
    ("utimensat", ("fd", 0, times(1, 10**9, 3, 4), 0)),
    ("utimensat", (HERE, 0, times(1, 2, 3, 4), 0)),
    ("utimensat", ("fd", b"\0", times(1, 2, 3, 4), 0)),
    ("chown", (b"{}/link\0", *OURS)),
    ("lchown", (b"{}/dangling\0", *OURS)),
    ("fchown", ("fd", -1, -1)),
    ("fchownat", ("dir", b"file\0", *OURS, 0)),
    ("readlink", (b"{}/link\0", bytes(64), 64)),
    ("readlink", (b"{}/link\0", bytes(64), 2)),
    ("readlink", (b"{}/file\0", bytes(64), 64)),
    ("readlink", (b"{}/link\0", bytes(64), 0)),
    ("readlinkat", ("dir", b"dangling\0", bytes(64), 64)),
    ("readlinkat", ("dir", b"none\0", bytes(64), 64)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{str(case[1])[:30]}")
def test_inside_each_call_ends_as_it_does_without_us_and_outside_nothing_changes(
    case: tuple[str, tuple[object, ...]], tmp_path: Path
) -> None:
    name, values = case
    if name not in NUMBERS:
        pytest.skip(f"this machine has no {name}")
    jail = tmp_path / "beside"
    jail.mkdir()
    found = {}
    for kind in ("kernel", "inside", "outside"):
        folder = tmp_path / kind
        opened = planted(folder)
        before = facts(folder)
        own = tuple(
            value.replace(b"{}", os.fsencode(folder))
            if isinstance(value, bytes)
            else opened.get(str(value), value)
            for value in values
        )
        if kind == "kernel":
            result = by_kernel(name, own)
        else:
            result = by_us(name, own, folder if kind == "inside" else jail)
        found[kind] = (result, facts(folder))
        for descriptor in opened.values():
            os.close(descriptor)
    assert found["inside"] == found["kernel"]
    assert found["outside"][0] < 0 and found["outside"][1] == before


def test_a_link_does_not_lead_out_and_a_mask_holds(tmp_path: Path) -> None:
    opened = planted(tmp_path / "outside")
    jail = tmp_path / "jail"
    (jail / "masked").mkdir(parents=True)
    (jail / "door").symlink_to("../outside/file")
    before = facts(tmp_path)
    path = os.fsencode(jail)
    assert by_us("fchmodat", (HERE, path + b"/door\0", 0o777), jail) == -errno.EPERM
    assert by_us("fchmodat", ("{}".format(opened["dir"]), b"file\0", 0o777), jail) == -errno.EPERM
    masked = FileChanges([str(jail)], [], [str(jail / "masked")])
    with pytest.raises(PermissionError):
        masked.answer("fchmodat", OurCall(words((HERE, path + b"/masked\0", 0o777))))
    assert facts(tmp_path) == before


@pytest.mark.parametrize("path", ["/proc/self/root", "/proc/self/fd/0/x", "/proc/1/cwd", "/proc/self/status"])
def test_paths_of_proc_do_not_lead_to_what_is_ours(path: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    for name in (path, str(tmp_path / "link")):
        assert by_us("fchmodat", (HERE, os.fsencode(name) + b"\0", 0o777), tmp_path) < 0


def test_a_descriptor_by_its_name_is_the_command_s(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as handle:
        for folder in ("/proc/self/fd", f"/proc/{os.getpid()}/fd", "/dev/fd"):
            os.fchmod(handle.fileno(), 0o600)
            assert by_us("fchmodat", (HERE, f"{folder}/{handle.fileno()}\0".encode(), 0o711), tmp_path) == 0
            assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o711
