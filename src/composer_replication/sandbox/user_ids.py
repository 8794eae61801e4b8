"""A user id that nobody has, for the processes of one jail."""

from __future__ import annotations

import random
from pathlib import Path

_FIRST_UID, _LAST_UID = 0x60000000, 0x6FFFFFFF
_FIRST_SMALL_UID, _LAST_SMALL_UID = 30000, 59999


def private_uid() -> int:
    """A user id that nobody has, from the range that this user namespace maps.

    The process limit counts per user id, so two jails must not share one: 2**28 ids
    to choose from make that as good as impossible.
    """
    mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    is_large = any(
        int(start) <= _FIRST_UID and int(start) + int(size) > _LAST_UID for start, _, size in mapped
    )
    first, last = (_FIRST_UID, _LAST_UID) if is_large else (_FIRST_SMALL_UID, _LAST_SMALL_UID)
    return random.SystemRandom().randint(first, last)
