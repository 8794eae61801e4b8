"""What this process may do as root: change the user id of a jail to one that nobody has, with the program ``setpriv``."""

from __future__ import annotations

import os
import random
import shutil
import socket
from functools import cache
from pathlib import Path

_LARGE = range(0x60000000, 0x70000000)
_SMALL = range(30000, 60000)
_NUM_TRIES = 1000
_reserved: dict[int, socket.socket] = {}
_SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_NEEDED = sum(1 << bit for bit in (0, 6, 7, 21))  # chown, setgid, setuid, sys_admin


def reserve_uid() -> int:
    """A user id that nobody has, from the range that this user namespace maps, and no other jail gets until ``release_uid``.

    The process limit counts per user id, so two jails must not share one. In a container there are 30,000 only: each is
    reserved by a name that only one socket of this network can have, and that ends with our process.
    """
    ids = _LARGE if _are_mapped(_LARGE) else _SMALL
    for _ in range(_NUM_TRIES):
        uid = random.SystemRandom().randint(ids[0], ids[-1])
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0composer-replication-user-{uid}")
        except OSError:
            name.close()
            continue
        _reserved[uid] = name
        return uid
    raise OSError("no user id is free for a jail")


def release_uid(uid: int | None) -> None:
    """The jail of this user id has ended; for any other one nothing happens."""
    if uid is not None and (name := _reserved.pop(uid, None)) is not None:
        name.close()


def _are_mapped(ids: range) -> bool:
    mapped = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(start <= ids[0] and start + size > ids[-1] for start, _, size in mapped)


def drops_uid() -> bool:
    """As root with its capabilities we change the user id; without them, or other ids, a user namespace must do."""
    if os.geteuid() != 0 or not _are_mapped(_SMALL):
        return False
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16) & _NEEDED == _NEEDED
    return False


@cache
def setpriv() -> str | None:
    """The program by its whole path: what a command is given as ``PATH`` must not choose it."""
    return shutil.which("setpriv", path=_SYSTEM_PATH) or shutil.which("setpriv")
