"""What waits in the buffers of sockets: memory of the kernel that no process has mapped.

Each socket of a process is asked itself, through a copy of its descriptor, which needs the right that a watch over
processes of our own has anyway.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterable
from contextlib import suppress

_PIDFD_GETFD = 438  # one number everywhere; Linux 5.6
_SO_MEMINFO = 55
_MEMINFO = struct.Struct("IIII")  # received, its limit, sent, its limit: in bytes of memory
_MOST_BYTES_EACH = 16 << 20  # what one can hold both ways where TCP tunes itself
_syscall = ctypes.CDLL(None, use_errno=True).syscall


def socket_memory_bytes(pids: Iterable[int], *, room_bytes: int) -> int:
    """Memory in the buffers of all sockets of these processes; 0 while they are too few to fill ``room_bytes``.

    A sender is charged for what a unix socket has not received yet; where the sender is closed, the receiver tells.
    Of datagrams it tells the next one alone.
    """
    found: dict[str, tuple[int, str]] = {}
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    link = os.readlink(f"/proc/{pid}/fd/{name}")
                    if link.startswith("socket:"):
                        found[link] = pid, name
    if len(found) * _MOST_BYTES_EACH <= room_bytes:
        return 0
    held = [_held_bytes(pid, int(name)) for pid, name in found.values()]
    return max(sum(charged for charged, _ in held), sum(waiting for _, waiting in held))


def _held_bytes(pid: int, number: int) -> tuple[int, int]:
    """What the socket is charged for, and what it has not read yet."""
    with suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            copy = int(_syscall(_PIDFD_GETFD, process, number, 0))
        finally:
            os.close(process)
        if copy >= 0:
            with socket.socket(fileno=copy) as asked:
                received, _, sent, _ = _MEMINFO.unpack(
                    asked.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, _MEMINFO.size)
                )
                waiting = fcntl.ioctl(asked, termios.FIONREAD, bytes(4))
                return received + sent, int.from_bytes(waiting, "little")
    return 0, 0
