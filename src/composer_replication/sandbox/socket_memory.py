"""What waits in the buffers of sockets: memory of the kernel that no process has mapped.

Each socket of a process is asked itself, through a copy of its descriptor, which needs the right that a watch over
processes of our own has anyway. Its owner may go meanwhile, and then the copy is the last: to close it may take as
long as the owner wished (``SO_LINGER``), for the side that does not read is a process of the run too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import subprocess
import termios
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

_PIDFD_GETFD = 438  # one number everywhere; Linux 5.6
_PIDFD_THREAD = os.O_EXCL  # Linux 6.9
_SO_MEMINFO = 55
# Received, its limit, sent, its limit, -, queued, -, backlog: in bytes of memory.
_MEMINFO = struct.Struct("8I")
_MOST_BYTES_EACH = 16 << 20  # what one can hold both ways where TCP tunes itself
_NUM_COPIES = 100  # at a time: we may not have many descriptors
_syscall = ctypes.CDLL(None, use_errno=True).syscall


@dataclass(frozen=True, slots=True)
class SocketMemory:
    """Bytes in buffers; ``is_whole`` is False when the sockets of a process cannot be asked."""

    num_bytes: int
    is_whole: bool


def socket_memory(pids: Iterable[int], *, room_bytes: int, deadline: float = inf) -> SocketMemory:
    """Memory in the buffers of all sockets of these processes; 0 while they are too few to fill ``room_bytes``.

    A sender is charged for what a unix socket has not received yet; where the sender is closed, the receiver tells.
    Of datagrams it tells the next one alone.

    Args:
        pids: living threads, one of each process.
        room_bytes: how much would matter.
        deadline: of ``time.monotonic``: after it, it asks no further and tells what it has.

    """
    found = _sockets(pids)
    if len(found) * _MOST_BYTES_EACH <= room_bytes:
        return SocketMemory(0, is_whole=True)
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
    return SocketMemory(max(charged, waiting), is_whole)


def _sockets(pids: Iterable[int]) -> list[tuple[int, int]]:
    """A process and its descriptor for each of their sockets."""
    found: dict[str, tuple[int, int]] = {}
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    link = os.readlink(f"/proc/{pid}/fd/{name}")
                    if link.startswith("socket:"):
                        found[link] = pid, int(name)
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
    """Of its process; the kernel wants to be told when it is not the first thread, which has ended then.

    Raises:
        OSError: it is gone, or the kernel gives no handle on such a thread (EINVAL).
    """
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
