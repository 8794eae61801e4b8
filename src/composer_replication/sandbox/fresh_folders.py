"""What each command of a jail finds empty: ``/tmp`` and ``/dev/shm``, as folders of ours or as a memory of the jail's own.

A jail owns the folders that it writes: it can change their modes, attributes and flags, which emptying does not undo.
And below ``/tmp`` lie mount points of the jail itself, which must stay while everything beside them goes.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from composer_replication.sandbox.folders import remove

SHARED_MEMORY = Path("/dev/shm")
_SMALLEST_BYTES = 1 << 12
_GET_FLAGS, _FLAG_BYTES = 0x80086601, 8  # FS_IOC_GETFLAGS where a long has 8 bytes
# What the file system itself notes on a folder as it grows, and nobody can take off: dirty, compressed blocks, an
# index, a huge file, extents, data in the inode.
_KEPT_BY_THE_SYSTEM = 0x100 | 0x200 | 0x1000 | 0x40000 | 0x80000 | 0x10000000
_Mark = tuple[object, ...]


class FreshFolders:
    """Folders as they are now: what is in them stays, what comes is removed. Call only while no process of the jail is alive.

    Args:
        roots: each with at most a few folders and links in it (mount points).
    """

    def __init__(self, roots: tuple[Path, ...]) -> None:
        self.roots = roots
        self._marks: dict[str, _Mark] = {}  # a folder comes before what is in it
        self.closed: set[str] = set()
        """Folders that somebody else owns and nobody else may write: nothing can have been changed inside."""
        owner = os.lstat(roots[0]).st_uid
        queue = [str(root) for root in roots]
        while queue:
            path = queue.pop()
            info = os.lstat(path)
            self._marks[path] = _mark_of(path)
            if info.st_uid != owner and not info.st_mode & 0o022:
                self.closed.add(path)
            if stat.S_ISDIR(info.st_mode):
                queue += [entry.path for entry in os.scandir(path)]

    def clear(self) -> bool:
        """Remove what was not there; False when something that was there is changed, gone or another one.

        Runs after every command: an entry costs a few microseconds.

        Raises:
            OSError: something cannot be looked at or removed.
        """
        for path, mark in self._marks.items():
            if _mark_of(path) != mark:
                return False
            if path in self.closed or os.path.islink(path) or not os.path.isdir(path):
                continue
            with os.scandir(path) as entries:
                left = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for new, is_folder in left:
                if new not in self._marks:
                    remove(Path(new), is_folder=is_folder)
        return True


def size_for(memory_bytes: int, disk_bytes: int) -> int:
    """How large a ``/dev/shm`` in memory is, in bytes: what lies there counts for both limits."""
    return max(_SMALLEST_BYTES, min(memory_bytes, disk_bytes))


class MemoryFolder:
    """The ``/dev/shm`` of a jail where it is a memory of its own, seen from outside, as it is before the first command.

    What is in it the kernel tells to the byte, whether it has a name, is open or only mapped, and it lets nobody write
    more than its size. So locks of ``multiprocessing``, which are deleted and mapped, cost what they take. A command may
    end its jail, and this folder with it: then it holds nothing and is not what it was.

    Args:
        descriptor: of the folder, open for reading; closed by ``close``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self.device = os.fstat(descriptor).st_dev
        self._before = _mark(descriptor)

    def used_bytes(self) -> int:
        """What is in it, deleted files too; 0 once it is closed."""
        if self._descriptor is None:
            return 0
        info = os.fstatvfs(self._descriptor)
        return (info.f_blocks - info.f_bfree) * info.f_frsize

    def is_untouched(self) -> bool:
        """Whether it is empty and else what it was; never once it is closed. Call while nothing runs."""
        if self._descriptor is None:
            return False
        return not os.listdir(self._descriptor) and _mark(self._descriptor) == self._before

    def close(self) -> None:
        """Let it go with the jail; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _mark_of(path: str) -> _Mark:
    """Of a folder, a link, or a file that is a mount point.

    Raises:
        OSError: nothing is there, or it is closed to us.
    """
    if os.path.islink(path):
        info = os.lstat(path)
        return info.st_dev, info.st_ino
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _mark(descriptor)
    finally:
        os.close(descriptor)


def _mark(folder: int) -> _Mark:
    """What an open folder is besides what lies in it: identity, owner, mode, attributes (access lists too) and inode flags."""
    info = os.fstat(folder)
    attributes: list[tuple[str, bytes]] = []
    flags = 0
    with suppress(OSError):  # a file system without them
        attributes = [(name, os.getxattr(folder, name)) for name in sorted(os.listxattr(folder))]
    with suppress(OSError):
        words = fcntl.ioctl(folder, _GET_FLAGS, b"\0" * _FLAG_BYTES)
        flags = int.from_bytes(words[:4], "little") & ~_KEPT_BY_THE_SYSTEM
    return info.st_dev, info.st_ino, info.st_uid, info.st_gid, info.st_mode, tuple(attributes), flags
