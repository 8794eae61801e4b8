"""Files that no folder lists any more and that processes still hold: open, running or mapped.

Of a file that is open or runs the kernel tells everyone who may look how large it is. Of one that is only
mapped it tells that to root alone (``/proc/PID/map_files``): others see its number, its last name and
which part is mapped. Who maps one page of a large file, closes and deletes it, keeps the rest uncounted;
so it matters whether there is such a file at all.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from composer_replication.sandbox.process_memory import (
    DELETED,
    MEMORY_FILES,
    MapsTooLongError,
    lines_of_maps,
)

_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Unlinked:
    """Bytes on disk, each file once; of one whose size nobody tells, ``is_whole`` is False and its mapped part counts.

    So it is where a process has too many mappings to look at them all.
    """

    num_bytes: int
    is_whole: bool


def unlinked_files(
    pids: Iterable[int],
    folders: Iterable[Path] = (),
    *,
    counted_device: int | None = None,
    deadline: float = inf,
    mapping: Container[int] | None = None,
) -> Unlinked:
    """What these processes hold of deleted files, memory files (memfd) that are open included.

    Args:
        pids: living threads, one of each process.
        folders: where they can write to disk, by the names that they have for it. A mapped file of which only the
            name is known is not theirs if it lay elsewhere: a library of the system that was replaced, or memory.
        counted_device: files of this one are counted by somebody else.
        deadline: of ``time.monotonic``: after it, it looks no further and tells what it has.
        mapping: those that have mapped deleted files, where it is known already; by default it finds out.
    """
    named = {os.fsencode(folder) for folder in folders}
    held = _Held(tuple(place + b"/" for place in named | {os.path.realpath(place) for place in named}))
    is_read = True
    for pid in pids:
        if time.monotonic() > deadline:
            break
        with suppress(OSError):
            held.add_open(pid)
        if mapping is not None and pid not in mapping:
            continue
        try:
            held.add_mapped(pid, deadline)
        except MapsTooLongError:
            is_read = False
        except OSError:  # gone
            continue
    unknown = [size for (_, inode, name), size in held.guessed.items() if (inode, name) not in held.names]
    known = sum(size for (device, _), size in held.sizes.items() if device != counted_device)
    return Unlinked(known + sum(unknown), is_read and not unknown)


@dataclass(slots=True)
class _Held:
    writable: tuple[bytes, ...]
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    # A mapping and a descriptor may name another device for the same file (btrfs, overlay): what tells whether
    # they are the same is number and name, in which no two mounts agree.
    names: set[tuple[int, bytes]] = field(default_factory=set)
    guessed: dict[tuple[bytes, int, bytes], int] = field(default_factory=dict)

    def add_open(self, pid: int) -> None:
        for place in (*(f"fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")), "exe"):
            with suppress(OSError):
                path = f"/proc/{pid}/{place}"
                info = os.stat(path)
                if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
                    self.sizes[info.st_dev, info.st_ino] = info.st_blocks * _BLOCK_BYTES
                    name = os.readlink(os.fsencode(path)).replace(b"\n", b"\\012")  # as in maps
                    self.names.add((info.st_ino, name))

    def add_mapped(self, pid: int, deadline: float) -> None:
        guessed: dict[tuple[bytes, int, bytes], int] = {}
        for lines in lines_of_maps(f"/proc/{pid}/maps", deadline):
            if DELETED + b"\n" not in lines:
                continue
            for line in lines.split(b"\n"):
                if line.endswith(DELETED):
                    self._add_mapping(pid, line, guessed)
        for key, size in guessed.items():
            self.guessed[key] = max(size, self.guessed.get(key, 0))

    def _add_mapping(self, pid: int, line: bytes, guessed: dict[tuple[bytes, int, bytes], int]) -> None:
        place, _, _, device, inode, name = line.split(maxsplit=5)
        if name.startswith(MEMORY_FILES):
            return  # counted as memory
        try:
            info = os.stat(f"/proc/{pid}/map_files/{place.decode()}")
            self.sizes[info.st_dev, info.st_ino] = info.st_blocks * _BLOCK_BYTES
        except OSError:
            if name.startswith(self.writable):
                first, last = (int(part, 16) for part in place.split(b"-"))
                key = (device, int(inode), name)
                guessed[key] = guessed.get(key, 0) + last - first
