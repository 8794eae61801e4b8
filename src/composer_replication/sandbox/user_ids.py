"""A user id that nobody has, for the processes of one jail."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LARGE = range(0x60000000, 0x70000000)
_SMALL = range(30000, 60000)
_NUM_TRIES = 1000
_reserved: dict[int, socket.socket] = {}


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
