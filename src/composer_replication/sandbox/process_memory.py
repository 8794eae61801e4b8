"""How much memory processes have, read from ``/proc``, of which a program can make the texts long and strange."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

_OWN_MEMORY = (b"RssAnon", b"VmPTE", b"VmSwap")
MEMORY_FILES = (b"/dev/zero", b"/memfd:", b"/SYSV", b"[anon_shmem:")
_SHARED_MEMORY = b"/dev/shm/"
DELETED = b" (deleted)"
_MAPPING_BYTES = 250  # of the kernel for each mapping, which no field counts
_PIECE_BYTES = 1 << 16
_MOST_MAPS_BYTES = 64 << 20
_LONGEST_LINE_BYTES = 1 << 20  # a path of that length has thousands of folders


class MapsTooLongError(Exception):
    """What ``/proc`` tells of the mappings of a process is longer than for any program that does honest work."""


def lines_of_maps(place: str, deadline: float) -> Iterator[bytes]:
    """``maps`` or ``smaps`` of a process, piece by piece, each of some whole lines; no more after ``deadline``.

    Each line has the path of the file, so a program can make gigabytes of it with one file and a long path.

    Raises:
        OSError: the process is gone, or does not show it.
        MapsTooLongError: it is not worth reading to its end.
    """
    descriptor = os.open(place, os.O_RDONLY)
    try:
        num_bytes, begun = 0, b""
        while time.monotonic() <= deadline and (piece := _read_piece(descriptor)):
            num_bytes += len(piece)
            piece = begun + piece
            # Only a newline ends a line: names may hold all else that text takes for the end of one.
            end = piece.rfind(b"\n") + 1
            begun = piece[end:]
            if num_bytes > _MOST_MAPS_BYTES or len(begun) > _LONGEST_LINE_BYTES:
                raise MapsTooLongError
            if end:
                yield piece[:end]
    finally:
        os.close(descriptor)


def _read_piece(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _PIECE_BYTES)
    except OSError as error:
        if error.errno == errno.ENOMEM:  # the kernel has no room for one line
            raise MapsTooLongError from error
        raise


def memory_bytes(pids: Collection[int], mappings: Mappings | None = None) -> int:
    """Anonymous and shared memory, page tables, mappings and swap, a page of several processes each time.

    Of shared memory also what no process touches at the moment, where the kernel shows it to us (to root).

    Args:
        pids: living threads, one of each process.
        mappings: of them; looked at by default.

    Raises:
        MapsTooLongError: as ``Mappings`` says.
    """
    own, shared = 0, 0
    for pid in pids:
        fields = _fields(f"/proc/{pid}/status")
        own += _sum(fields, _OWN_MEMORY)
        shared += fields.get(b"RssShmem", 0)
    return own + (mappings or Mappings.of(pids)).num_bytes(shared)


def proportional_memory_bytes(
    pids: Collection[int],
    mappings: Mappings | None = None,
    *,
    in_shared_folder_bytes: int = 0,
    deadline: float = inf,
) -> int:
    """The same, but a page that N processes share counts once in total (slow to read).

    Args:
        pids: as above.
        mappings: as above.
        in_shared_folder_bytes: what lies in a ``/dev/shm`` of their own, mapped or not: added, each page once.
        deadline: after it the sum means nothing.

    Raises:
        MapsTooLongError: as ``Mappings`` says.
    """
    own, shared = 0, 0
    for pid in pids:
        if time.monotonic() > deadline:
            break
        fields, exact = _fields(f"/proc/{pid}/status"), _fields(f"/proc/{pid}/smaps_rollup")
        if anonymous := _sum(exact, (b"Pss_Anon", b"SwapPss")):
            own += anonymous + fields.get(b"VmPTE", 0)
            shared += exact.get(b"Pss_Shmem", 0)
        else:
            own += _sum(fields, _OWN_MEMORY)
            shared += fields.get(b"RssShmem", 0)
    if in_shared_folder_bytes:
        shared -= min(shared, in_shared_folder_bytes, _mapped_of_shared_folder(pids, deadline))
    return own + (mappings or Mappings.of(pids)).num_bytes(shared) + in_shared_folder_bytes


def _fields(path: str) -> dict[bytes, int]:
    """Every field of such a file that is a whole number of kB, in bytes; none when the process is gone.

    The name of a process is in there and is its own choice. As text it could end a line; in bytes only a newline
    does, which the kernel writes as two characters.
    """
    found: dict[bytes, int] = {}
    with suppress(OSError):
        for line in Path(path).read_bytes().split(b"\n"):
            if line.endswith(b" kB"):
                name, _, rest = line.removesuffix(b" kB").partition(b":")
                if (number := rest.strip()).isdigit():
                    found[name] = int(number) * 1024
    return found


def _sum(fields: dict[bytes, int], names: Iterable[bytes]) -> int:
    return sum(fields.get(name, 0) for name in names)


@dataclass(slots=True)
class Mappings:
    """How many there are, and the size of all shared memory without a name and of each memfd among them."""

    num_mappings: int = 0
    sizes: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    are_shown: bool = True
    with_deleted: set[int] = field(default_factory=set)
    """Whose some are of files that have no name any more, memory included."""

    @classmethod
    def of(cls, pids: Iterable[int], *, enough_bytes: float = inf, deadline: float = inf) -> Mappings:
        """Those of these processes; not all, once they cost the kernel ``enough_bytes`` or ``deadline`` is over.

        Raises:
            MapsTooLongError: as ``lines_of_maps`` says, or they are so for all processes together.
        """
        found, num_bytes = cls(), 0
        for pid in pids:
            with suppress(OSError):  # gone
                for lines in lines_of_maps(f"/proc/{pid}/maps", deadline):
                    num_bytes += len(lines)
                    if num_bytes > _MOST_MAPS_BYTES:
                        raise MapsTooLongError
                    found.num_mappings += lines.count(b"\n")
                    if found.kernel_bytes > enough_bytes:
                        return found
                    if DELETED + b"\n" in lines:
                        found.with_deleted.add(pid)
                    if found.are_shown and any(name in lines for name in MEMORY_FILES):
                        found._add_files(pid, lines)
        return found

    @property
    def kernel_bytes(self) -> int:
        """What the mappings themselves cost, whatever is mapped."""
        return self.num_mappings * _MAPPING_BYTES

    def _add_files(self, pid: int, lines: bytes) -> None:
        for line in lines.split(b"\n")[:-1]:
            place, _, _, device, inode, *path = line.split(maxsplit=5)
            if not path or not path[0].startswith(MEMORY_FILES) or (device, inode) in self.sizes:
                continue
            try:
                info = os.stat(f"/proc/{pid}/map_files/{place.decode()}")
            except PermissionError:  # none of any process, for we are not root
                self.are_shown = False
                break
            except OSError:  # unmapped by now
                continue
            self.sizes[device, inode] = info.st_blocks * 512

    def num_bytes(self, shared: int) -> int:
        """Of mappings and shared memory, of which ``shared`` is touched at the moment."""
        return self.kernel_bytes + max(shared, sum(self.sizes.values()))


def _mapped_of_shared_folder(pids: Iterable[int], deadline: float) -> int:
    """Pages of files of ``/dev/shm`` that are mapped as shared; a private mapping may hold pages of its own."""
    total = 0
    for pid in pids:
        is_of_it = False
        with suppress(OSError):
            for lines in lines_of_maps(f"/proc/{pid}/smaps", deadline):
                if not is_of_it and _SHARED_MEMORY not in lines:
                    continue
                for line in lines.split(b"\n"):
                    words = line.split(maxsplit=5)
                    if len(words) > 4 and b"-" in words[0]:
                        is_of_it = words[1].endswith(b"s") and words[-1].startswith(_SHARED_MEMORY)
                    elif is_of_it and line.startswith(b"Pss:"):
                        total += int(words[1]) * 1024
    return total
