"""What a folder is besides what lies in it, and how a folder is brought back to what it was.

A jail owns the folders that it writes: it can change their modes, attributes and flags,
which emptying does not undo. And below ``/tmp`` lie mount points of the jail itself, which
must stay while everything beside them goes. Call only while no process of the jail is alive.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from composer_replication.sandbox.closed_folders import open_to_owner
from composer_replication.sandbox.folder_removal import remove_folder

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and SETFLAGS where a long has 8 bytes
_FLAG_BYTES = 8
# What the file system itself notes on a folder as it grows, and nobody can take off: dirty, compressed blocks, an
# index, a huge file, extents, data in the inode.
_KEPT_BY_THE_SYSTEM = 0x100 | 0x200 | 0x1000 | 0x40000 | 0x80000 | 0x10000000
_Stamp = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class FolderMark:
    """Identity, owner, mode, extended attributes (access lists too) and inode flags of a folder.

    Flags that the file system keeps for itself are left out.
    """

    identity: tuple[int, int]
    owner: tuple[int, int]
    mode: int
    attributes: tuple[tuple[str, bytes], ...]
    flags: int | None

    @classmethod
    def of(cls, folder: Path) -> FolderMark:
        """The mark of what is there, links unfollowed.

        Raises:
            OSError: nothing is there.
        """
        info = os.lstat(folder)
        is_folder = stat.S_ISDIR(info.st_mode)
        return cls(
            (info.st_dev, info.st_ino),
            (info.st_uid, info.st_gid),
            info.st_mode,
            _attributes(folder),
            _flags(folder) if is_folder else None,
        )

    def put_back(self, folder: Path) -> None:
        """Undo what was changed; the times become those of now."""
        open_to_owner(folder)  # closed it shows neither its attributes nor its flags
        now = FolderMark.of(folder)
        if self.flags is not None and now.flags != self.flags:
            _set_flags(folder, self.flags)
        if now.owner != self.owner:
            os.chown(folder, *self.owner, follow_symlinks=False)
        for name in {name for name, _ in now.attributes} - {name for name, _ in self.attributes}:
            os.removexattr(folder, name, follow_symlinks=False)
        for name, value in set(self.attributes) - set(now.attributes):
            os.setxattr(folder, name, value, follow_symlinks=False)
        os.chmod(folder, stat.S_IMODE(self.mode))
        os.utime(folder)


def _attributes(folder: Path | str) -> tuple[tuple[str, bytes], ...]:
    try:
        names = sorted(os.listxattr(folder, follow_symlinks=False))
    except OSError:  # a file system without them
        return ()
    return tuple((name, os.getxattr(folder, name, follow_symlinks=False)) for name in names)


def _flags(folder: Path | str) -> int | None:
    with suppress(OSError):  # closed to us, or a file system without them
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return inode_flags(descriptor)
        finally:
            os.close(descriptor)
    return None


def inode_flags(descriptor: int) -> int | None:
    """Of an open folder, but what the file system keeps for itself; None where it has none."""
    with suppress(OSError):
        return _asked(descriptor, _GET_FLAGS) & ~_KEPT_BY_THE_SYSTEM
    return None


def _asked(descriptor: int, request: int) -> int:
    return int.from_bytes(fcntl.ioctl(descriptor, request, b"\0" * _FLAG_BYTES)[:4], "little")


def _set_flags(folder: Path, flags: int) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        flags |= _asked(descriptor, _GET_FLAGS) & _KEPT_BY_THE_SYSTEM
        fcntl.ioctl(descriptor, _SET_FLAGS, flags.to_bytes(_FLAG_BYTES, "little"))
    finally:
        os.close(descriptor)


class FreshFolders:
    """Folders as they are now, to come back to: what is in them stays, what comes is removed.

    Args:
        roots: each with at most a few folders and links in it (mount points).
    """

    def __init__(self, roots: tuple[Path, ...]) -> None:
        self.roots = roots
        self._marks: dict[str, FolderMark] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._inside: dict[str, set[str]] = {}
        queue = [str(root) for root in roots]
        while queue:
            path = queue.pop()
            self._marks[path] = FolderMark.of(Path(path))
            self._stamps[path] = _stamp(path)
            if stat.S_ISDIR(self._stamps[path][2]):
                self._inside[path] = {entry.path for entry in os.scandir(path)}
                queue += self._inside[path]
        owner = self._stamps[str(roots[0])][3]
        self.closed = {
            path for path, stamp in self._stamps.items() if stamp[3] != owner and not stamp[2] & 0o022
        }

    def clear(self) -> bool:
        """Remove what was not there; False when something that was there is gone or another one.

        Runs after every command: an entry costs a few microseconds. A folder that somebody else owns
        and nobody else may write cannot have been changed inside.

        Raises:
            OSError: a folder cannot be brought back.
        """
        whole = [self._clear_folder(str(root)) for root in self.roots]
        return all(whole)  # after all of them were cleared

    def _clear_folder(self, folder: str) -> bool:
        now, before = _stamp(folder), self._stamps[folder]
        if _is_other(now, before):
            return False
        mark = self._marks[folder]
        if now != before or _attributes(folder) != mark.attributes:
            mark.put_back(Path(folder))
        with os.scandir(folder) as entries:
            found = {entry.path: entry.is_dir(follow_symlinks=False) for entry in entries}
        known = self._inside[folder]
        is_whole = known <= found.keys()
        for path, is_folder in found.items():
            if path not in known:
                remove(Path(path), is_folder=is_folder)
            elif is_folder and path in self._inside and path not in self.closed:
                is_whole = self._clear_folder(path) and is_whole
            else:
                is_whole = not _is_other(_stamp(path), self._stamps[path]) and is_whole
        return is_whole


def _is_other(now: _Stamp, before: _Stamp) -> bool:
    """Another inode, or another kind of thing, than the one that we knew."""
    return now[:2] != before[:2] or stat.S_IFMT(now[2]) != stat.S_IFMT(before[2])


def _stamp(path: str) -> _Stamp:
    info = os.lstat(path)
    return info.st_dev, info.st_ino, info.st_mode, info.st_uid, info.st_gid


def remove(path: Path, *, is_folder: bool) -> None:
    """Remove an entry whatever a jail made of it.

    Raises:
        OSError: it is still there.
    """
    if is_folder:
        remove_folder(path)
        if os.path.lexists(path):
            raise OSError(errno.ENOTEMPTY, "it cannot be removed", str(path)[:200])
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def empty(folder: Path) -> None:
    """Remove everything in a folder; the folder itself stays, for it may be mounted.

    Raises:
        OSError: something is still there.
    """
    with os.scandir(folder) as entries:
        found = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for path, is_folder in found:
        remove(path, is_folder=is_folder)
