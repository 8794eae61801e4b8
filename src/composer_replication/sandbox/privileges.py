"""What this process may do as root: change the user id of a jail to one that nobody has, with the program ``setpriv``."""

from __future__ import annotations

import os
import random
import resource
import shutil
import socket
from functools import cache
from pathlib import Path

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits

_LARGE = range(0x60000000, 0x70000000)
_SMALL = range(30000, 60000)
_NUM_TRIES = 1000
_reserved: dict[int, socket.socket] = {}
_SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_NEEDED = sum(1 << bit for bit in (0, 6, 7, 21))  # chown, setgid, setuid, sys_admin
_FLAGS = {
    resource.RLIMIT_DATA: ("memory_bytes", "-d"),
    resource.RLIMIT_FSIZE: ("disk_bytes", "-f"),
    resource.RLIMIT_NOFILE: ("num_open_files", "-n"),
}
"""By kind: the name in ``Limits``, and the flag of ``ulimit``."""


def private_uid() -> int:
    """A user id that nobody has, from the range that this user namespace maps.

    The process limit counts per user id, so two jails must not share one: 2**28 ids to choose from make that as good as
    impossible. In a container there are 30,000 only.
    """
    return _drawn(_LARGE if _are_mapped(_LARGE) else _SMALL)


def reserve_uid() -> int:
    """A ``private_uid`` that no other jail gets until ``release_uid``.

    Of the few in a container each is reserved by a name that only one socket of this network can have, and that
    ends with our process.

    Raises:
        OSError: none is free.
    """
    if _are_mapped(_LARGE):
        return private_uid()
    for _ in range(_NUM_TRIES):
        uid = _drawn(_SMALL)
        if _reserve(uid):
            return uid
    raise OSError("no user id is free for a jail")


def _reserve(uid: int) -> bool:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0composer-replication-user-{uid}")
    except OSError:
        name.close()
        return False
    _reserved[uid] = name
    return True


def release_uid(uid: int | None) -> None:
    """The jail of this user id has ended; for any other one nothing happens."""
    if uid is not None and (name := _reserved.pop(uid, None)) is not None:
        name.close()


def are_mapped() -> bool:
    """Whether this user namespace knows other ids than its own, for jails."""
    return _are_mapped(_SMALL)


def _are_mapped(ids: range) -> bool:
    mapped = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(start <= ids[0] and start + size > ids[-1] for start, _, size in mapped)


def _drawn(ids: range) -> int:
    return random.SystemRandom().randint(ids[0], ids[-1])


def drops_uid() -> bool:
    """As root with its capabilities we change the user id; without them, or other ids, a user namespace must do."""
    if os.geteuid() != 0 or not are_mapped():
        return False
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16) & _NEEDED == _NEEDED
    return False


@cache
def setpriv() -> str | None:
    """The program by its whole path: what a command is given as ``PATH`` must not choose it."""
    return shutil.which("setpriv", path=_SYSTEM_PATH) or shutil.which("setpriv")


def check_own_limits(limits: Limits) -> None:
    """May this process give its children these limits? Only root raises what it was allowed itself.

    Raises:
        SandboxFailure: it was allowed less (CR0302).
    """
    if os.geteuid() == 0:
        return
    for kind, (name, flag) in _FLAGS.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY and getattr(limits, name) > hard:
            raise SandboxFailure(
                "CR0302",
                f"a sandbox asks for {name}={getattr(limits, name)} and this process may have {hard} (ulimit -H{flag[1]}).",
                fix=f"raise that limit of this shell, or ask for less: Limits({name}={hard}).",
            )
