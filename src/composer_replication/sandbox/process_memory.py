"""What processes hold beside files that have a name: threads, memory, buffers of sockets, deleted files. A program can make its texts in ``/proc`` long and strange.

Each socket of a process is asked itself, through a copy of its descriptor, which needs the right that a watch over
processes of our own has anyway. Its owner may go meanwhile, and then the copy is the last: to close it may take as
long as the owner wished (``SO_LINGER``), for the side that does not read is a process of the run too.

Of a deleted file that is open or runs the kernel tells everyone who may look how large it is. Of one that is only
mapped it tells that to root alone (``/proc/PID/map_files``): others see its number, its last name and
which part is mapped. Who maps one page of a large file, closes and deletes it, keeps the rest uncounted;
so it matters whether there is such a file at all.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import socket
import stat
import struct
import subprocess
import termios
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

_OWN_MEMORY = (b"RssAnon", b"VmPTE", b"VmSwap")
_MEMORY_FILES = (b"/dev/zero", b"/memfd:", b"/SYSV", b"[anon_shmem:")
_DELETED = b" (deleted)"
_MAPPING_BYTES = 250  # of the kernel for each mapping, which no field counts
_PIECE_BYTES = 1 << 16
_MOST_MAPS_BYTES = 64 << 20
_LONGEST_LINE_BYTES = 1 << 20  # a path of that length has thousands of folders
_PIDFD_GETFD = 438  # one number everywhere; Linux 5.6
_PIDFD_THREAD = os.O_EXCL  # Linux 6.9
_SO_MEMINFO = 55
# Received, its limit, sent, its limit, -, queued, -, backlog: in bytes of memory.
_MEMINFO = struct.Struct("8I")
_MOST_BYTES_EACH = 16 << 20  # what one can hold both ways where TCP tunes itself
_NUM_COPIES = 100  # at a time: we may not have many descriptors
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_BLOCK_BYTES = 512
_ON_THEIR_WAY = re.compile(rb"^scm_fds:\s*[1-9]", re.MULTILINE)
_Guessed = dict[tuple[bytes, int, bytes], int]


class MapsTooLongError(Exception):
    """What ``/proc`` tells of the mappings of a process is longer than for any program that does honest work."""


def lines_of_maps(place: str, deadline: float) -> Iterator[bytes]:
    """``maps`` or ``smaps`` of a process, piece by piece, each of some whole lines; no more after ``deadline``.

    Each line has the path of the file, so a program can make gigabytes of it with one file and a long path.
    """
    descriptor = os.open(place, os.O_RDONLY)
    try:
        num_bytes, begun = 0, b""
        while time.monotonic() <= deadline:
            try:
                piece = os.read(descriptor, _PIECE_BYTES)
            except OSError as error:
                if error.errno == errno.ENOMEM:  # the kernel has no room for one line
                    raise MapsTooLongError from error
                raise
            if not piece:
                break
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


def memory_bytes(
    pids: Collection[int], mappings: Mappings | None = None, *, is_exact: bool = False, deadline: float = inf
) -> int:
    """Anonymous and shared memory, page tables, mappings and swap of these processes (a living thread of each).

    A page that several of them share counts each time; once in total where the sum is to be exact, which is slow to
    read, and means nothing after ``deadline``. Of shared memory also what no process touches at the moment, where the
    kernel shows it to us (to root).
    """
    own, shared = 0, 0
    for pid in pids:
        if time.monotonic() > deadline:
            break
        fields = _fields(f"/proc/{pid}/status")
        exact = _fields(f"/proc/{pid}/smaps_rollup") if is_exact else {}
        if anonymous := exact.get(b"Pss_Anon", 0) + exact.get(b"SwapPss", 0):
            own += anonymous + fields.get(b"VmPTE", 0)
            shared += exact.get(b"Pss_Shmem", 0)
        else:
            own += sum(fields.get(name, 0) for name in _OWN_MEMORY)
            shared += fields.get(b"RssShmem", 0)
    return own + (mappings or Mappings.of(pids)).num_bytes(shared)


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


@dataclass(slots=True)
class Mappings:
    """What the mappings of some processes tell: how many they are, shared memory without a name, files without one."""

    num_mappings: int = 0
    memory_files: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    """The size of all shared memory without a name and of each memfd, by device and inode; told to root alone."""
    deleted: dict[tuple[int, int], int] = field(default_factory=dict)
    guessed: _Guessed = field(default_factory=dict)
    """Of a deleted file whose size nobody tells, the part that is mapped: by device, inode and last name."""

    @classmethod
    def of(
        cls,
        pids: Iterable[int],
        folders: Iterable[Path] = (),
        *,
        enough_bytes: float = inf,
        deadline: float = inf,
    ) -> Mappings:
        """Those of these processes; not all, once they cost the kernel ``enough_bytes`` or ``deadline`` is over.

        ``folders`` are where they can write to disk, by the names that they have for it. A deleted file of which only the
        name is known is not theirs if it lay elsewhere: a library of the system that was replaced, or memory.
        """
        found, num_bytes = cls(), 0
        named = {os.fsencode(folder) for folder in folders}
        writable = tuple(place + b"/" for place in named | {os.path.realpath(place) for place in named})
        for pid in pids:
            guessed: _Guessed = {}
            with suppress(OSError):  # gone
                for lines in lines_of_maps(f"/proc/{pid}/maps", deadline):
                    num_bytes += len(lines)
                    if num_bytes > _MOST_MAPS_BYTES:
                        raise MapsTooLongError
                    found.num_mappings += lines.count(b"\n")
                    if found.kernel_bytes > enough_bytes:
                        return found
                    if _DELETED + b"\n" in lines or any(name in lines for name in _MEMORY_FILES):
                        found._add_files(pid, lines, writable, guessed)
            for key, size in guessed.items():
                found.guessed[key] = max(size, found.guessed.get(key, 0))
        return found

    @property
    def kernel_bytes(self) -> int:
        """What the mappings themselves cost, whatever is mapped."""
        return self.num_mappings * _MAPPING_BYTES

    def _add_files(self, pid: int, lines: bytes, writable: tuple[bytes, ...], guessed: _Guessed) -> None:
        for line in lines.split(b"\n")[:-1]:
            place, _, _, device, inode, *names = line.split(maxsplit=5)
            is_memory = bool(names) and names[0].startswith(_MEMORY_FILES)
            is_known = is_memory and (device, inode) in self.memory_files
            if is_known or not (is_memory or line.endswith(_DELETED)):
                continue
            try:
                info = os.stat(f"/proc/{pid}/map_files/{place.decode()}")
            except OSError as error:
                if is_memory and not isinstance(error, PermissionError):  # unmapped by now
                    continue
                info = None  # none of any process is shown, for we are not root
            if is_memory:
                self.memory_files[device, inode] = 0 if info is None else info.st_blocks * _BLOCK_BYTES
            elif info is not None:
                self.deleted[info.st_dev, info.st_ino] = info.st_blocks * _BLOCK_BYTES
            elif names[0].startswith(writable):
                first, last = (int(part, 16) for part in place.split(b"-"))
                key = (device, int(inode), names[0])
                guessed[key] = guessed.get(key, 0) + last - first

    def num_bytes(self, shared: int) -> int:
        """Of mappings and shared memory, of which ``shared`` is touched at the moment."""
        return self.kernel_bytes + max(shared, sum(self.memory_files.values()))


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes that processes hold; ``is_whole`` is False where one cannot be asked, or nobody tells the size of all it holds."""

    num_bytes: int
    is_whole: bool


def socket_memory(pids: Iterable[int], *, room_bytes: int, deadline: float = inf) -> Counted:
    """Memory in the buffers of all sockets of these processes; 0 while they are too few to fill ``room_bytes``.

    A sender is charged for what a unix socket has not received yet; where the sender is closed, the receiver tells.
    Of datagrams it tells the next one alone. After ``deadline`` it asks no further and tells what it has.
    """
    found = _sockets(pids)
    if len(found) * _MOST_BYTES_EACH <= room_bytes:
        return Counted(0, is_whole=True)
    charged, waiting, is_whole = 0, 0, True
    for first in range(0, len(found), _NUM_COPIES):
        if time.monotonic() > deadline:
            break
        lingering: list[int] = []
        try:
            for pid, number in found[first : first + _NUM_COPIES]:
                held = _held_bytes(pid, number, lingering)
                is_whole = is_whole and held is not None
                if held is not None:
                    charged, waiting = charged + held[0], waiting + held[1]
        finally:
            _let_go(lingering)
    return Counted(max(charged, waiting), is_whole)


def _sockets(pids: Iterable[int]) -> list[tuple[int, int]]:
    """A process and its descriptor for each of their sockets."""
    found: dict[str, tuple[int, int]] = {}
    for pid in pids:
        with suppress(OSError):
            found.update((name, (pid, descriptor)) for name, descriptor in sockets_of(pid))
    return list(found.values())


def _held_bytes(pid: int, number: int, lingering: list[int]) -> tuple[int, int] | None:
    """What the socket is charged for, and what it has not read yet; None when its process cannot be asked.

    A copy that must not be closed here goes to ``lingering``.
    """
    try:
        process = _handle(pid)
    except OSError as error:
        return None if error.errno == errno.EINVAL else (0, 0)
    try:
        copy = int(_syscall(_PIDFD_GETFD, process, number, 0))
    finally:
        os.close(process)
    if copy < 0:  # closed, or gone with its process
        return 0, 0
    try:
        asked = socket.socket(fileno=copy)
    except OSError:  # something else has its number by now
        lingering.append(copy)
        return 0, 0
    is_unix = asked.family == socket.AF_UNIX
    try:
        return _asked(asked, is_unix=is_unix)
    finally:
        if asked.type == socket.SOCK_STREAM and not is_unix:
            lingering.append(asked.detach())
        else:
            asked.close()


def _handle(thread: int) -> int:
    """Of its process; the kernel wants to be told when it is not the first thread, which has ended then."""
    try:
        return os.pidfd_open(thread)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise
    return os.pidfd_open(thread, _PIDFD_THREAD)


def _asked(asked: socket.socket, *, is_unix: bool) -> tuple[int, int]:
    with suppress(OSError):
        found = asked.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
        received, _, sent, _, _, queued, _, backlog = _MEMINFO.unpack(found)
        # What TCP keeps to send counts as queued, and only what is under way as sent.
        charged = received + max(sent, queued) + backlog
        if not is_unix:  # each side is charged for what it has
            return charged, charged
        waiting = fcntl.ioctl(asked, termios.FIONREAD, bytes(4))
        return charged, int.from_bytes(waiting, "little")
    return 0, 0


def _let_go(copies: Sequence[int]) -> None:
    """Close them without waiting for anybody: the last to have them is a process that ends, and such a one never waits.

    Where no process can be had, which may be the doing of the run, we wait.
    """
    if not copies:
        return
    nothing = subprocess.DEVNULL
    try:
        holder = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, pass_fds=copies
        )
    except OSError:
        return
    finally:
        for copy in copies:
            os.close(copy)
    holder.communicate()


def unlinked_files(
    pids: Iterable[int], mappings: Mappings, *, counted_device: int | None = None, deadline: float = inf
) -> Counted:
    """What these processes hold of deleted files, memory files (memfd) that are open included: bytes on disk, each file once.

    Of a file whose size nobody tells its mapped part counts, and the sum is not whole. Files of ``counted_device`` are
    counted by somebody else. After ``deadline`` it looks no further and tells what it has.
    """
    sizes = dict(mappings.deleted)
    # A mapping and a descriptor may name another device for the same file (btrfs, overlay): what tells whether
    # they are the same is number and name, in which no two mounts agree.
    open_names: set[tuple[int, bytes]] = set()
    for pid in pids:
        if time.monotonic() > deadline:
            break
        with suppress(OSError):
            for place in (*(f"fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")), "exe"):
                with suppress(OSError):
                    path = f"/proc/{pid}/{place}"
                    info = os.stat(path)
                    if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
                        sizes[info.st_dev, info.st_ino] = info.st_blocks * _BLOCK_BYTES
                        name = os.readlink(os.fsencode(path)).replace(b"\n", b"\\012")  # as in maps
                        open_names.add((info.st_ino, name))
    unknown = [size for (_, inode, name), size in mappings.guessed.items() if (inode, name) not in open_names]
    known = sum(size for (device, _), size in sizes.items() if device != counted_device)
    return Counted(known + sum(unknown), not unknown)


def num_threads(pids: Iterable[int]) -> int:
    """Threads of all these processes."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += os.stat(f"/proc/{pid}/task").st_nlink - 2
    return total


def hides_descriptors(pids: Iterable[int]) -> bool:
    """Are descriptors of one of them kept where they cannot be counted?

    On their way in a socket they are in no process's list; ``fdinfo`` counts them since Linux 5.10. And a process
    that made itself undumpable shows its list to nobody but root. So does one that has given back its memory
    on the way to its end, with nothing to hide.
    """
    for pid in pids:
        with suppress(OSError):  # gone
            try:
                for _, descriptor in sockets_of(pid):
                    with suppress(OSError):
                        if _ON_THEIR_WAY.search(Path(f"/proc/{pid}/fdinfo/{descriptor}").read_bytes()):
                            return True
            except PermissionError:
                if not Path(f"/proc/{pid}/statm").read_text().startswith("0 "):
                    return True
    return False


def sockets_of(pid: int) -> Iterator[tuple[str, int]]:
    """What tells one socket from others, and its descriptor, for each that a process has open.

    Raises:
        OSError: the process is gone, or shows its descriptors to nobody (``PermissionError``).
    """
    for number in os.listdir(f"/proc/{pid}/fd"):
        name = ""
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(f"/proc/{pid}/fd/{number}")
        if name.startswith("socket:"):
            yield name, int(number)
