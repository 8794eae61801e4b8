"""The ``/dev/shm`` of a jail where it is a memory of its own, seen from outside.

What is in it the kernel tells to the byte, whether it has a name, is open or only mapped, and it lets
nobody write more than its size. So locks of ``multiprocessing``, which are deleted and mapped, cost
what they take.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from composer_replication.sandbox.fresh_folders import inode_flags

PLACE = Path("/dev/shm")
_SMALLEST_BYTES = 1 << 12


def size_for(memory_bytes: int, disk_bytes: int) -> int:
    """How large it is, in bytes: what lies there counts for both limits."""
    return max(_SMALLEST_BYTES, min(memory_bytes, disk_bytes))


class MemoryFolder:
    """One such folder, as it is before the first command.

    A command may end its jail, and this folder with it: then it holds nothing and is not what it was.

    Args:
        descriptor: of the folder, open for reading; closed by ``close``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self.device = os.fstat(descriptor).st_dev
        self._before = _state(descriptor)

    def used_bytes(self) -> int:
        """What is in it, deleted files too; 0 once it is closed."""
        if self._descriptor is None:
            return 0
        info = os.fstatvfs(self._descriptor)
        return (info.f_blocks - info.f_bfree) * info.f_frsize

    def is_untouched(self) -> bool:
        """Whether it is empty, and its mode, owner, attributes and flags are what they were; call while nothing runs.

        Never once it is closed.
        """
        if self._descriptor is None:
            return False
        return not os.listdir(self._descriptor) and _state(self._descriptor) == self._before

    def close(self) -> None:
        """Let it go with the jail; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _state(descriptor: int) -> tuple[object, ...]:
    info = os.fstat(descriptor)
    attributes: list[tuple[str, bytes]] = []
    with suppress(OSError):  # a kernel without them
        attributes = [(name, os.getxattr(descriptor, name)) for name in os.listxattr(descriptor)]
    return info.st_mode, info.st_uid, info.st_gid, tuple(attributes), inode_flags(descriptor)
