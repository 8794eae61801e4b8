"""Folders that hostile code fills: opened to their owner again, looked through, and removed; no link is ever followed.

A path in one may be longer than the system takes, so each folder is opened relative to the one above it. To look through
one takes few descriptors: of the folders on the way the deepest are held; to one further up the way back is ``..``, and
it must be the folder that we came through. To remove one, a folder in it is moved to its top before it is looked into:
nothing is ever deep, and the work grows with the number of entries alone. Remove only while no process of the jail is alive.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

_HELD = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
LOOK, CHANGE = 0o500, 0o700  # what it takes to go through a folder, and to change what is in it
MOST_ENTRIES = 250_000
MOST_PATH_BYTES = 32 * 1024**2
_MOST_OPEN = 32
_WENT_AWAY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

Found = tuple[str, os.stat_result]


def hold_folder(
    folder: Path | str, above: int | None = None, needed: int = LOOK, *, whoever_owns_it: bool = False
) -> int:
    """A descriptor that names a folder, links unfollowed; ``above`` is the folder that ``folder`` is relative to.

    Where its owner lacks one of the rights ``needed`` he gets every right, if that is our own user: what is
    somebody else's we use as root, or not at all.
    """
    held = os.open(folder, _HELD, dir_fd=above)
    try:
        info = os.fstat(held)
        if info.st_mode & needed != needed and (whoever_owns_it or info.st_uid == os.geteuid()):
            os.chmod(f"/proc/self/fd/{held}", stat.S_IMODE(info.st_mode) | CHANGE)
    except BaseException:
        os.close(held)
        raise
    return held


def open_to_owner(folder: Path | str, needed: int = CHANGE) -> None:
    """Give a folder's owner, whoever that is, every right to it, where one of ``needed`` is missing."""
    os.close(hold_folder(folder, needed=needed, whoever_owns_it=True))


def open_folder(folder: Path | str, above: int | None = None, needed: int = LOOK) -> int:
    """Open a folder to list it; held as by ``hold_folder`` meanwhile."""
    held = hold_folder(folder, above, needed)
    try:
        return os.open(f"/proc/self/fd/{held}", _READ)
    finally:
        os.close(held)


class _Level:
    """A folder on the way down; ``folders`` in it are still to be looked into."""

    def __init__(self, descriptor: int, prefix: str) -> None:
        self.descriptor: int | None = descriptor
        self.identity = _identity(descriptor)
        self.prefix = prefix
        self.folders: list[str] = []

    def entries(self) -> Iterator[Found]:
        assert self.descriptor is not None
        with os.scandir(self.descriptor) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):
                        self.folders.append(entry.name)
                    yield self.prefix + entry.name, info

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def walk(start: int, prefix: str = "") -> Iterator[Found]:
    """Every entry below an open folder, which is closed at the end; a folder comes before what is in it.

    What goes away or becomes something else meanwhile is left out. Closed folders of our own user are opened.
    Each path begins with ``prefix``.
    """
    levels = [_Level(start, prefix)]  # only the last ``_MOST_OPEN`` are held open
    try:
        num_entries = num_bytes = 0
        is_new = True
        while levels:
            here = levels[-1]
            if is_new:
                for path, info in here.entries():
                    num_entries += 1
                    num_bytes += len(os.fsencode(path))
                    _check_room(num_entries, num_bytes)
                    yield path, info
            if is_new := bool(here.folders):
                is_new = _go_down(levels, here.folders.pop())
            else:
                _go_up(levels)
    finally:
        for level in levels:
            level.close()


def _go_down(levels: list[_Level], name: str) -> bool:
    """Go into a folder; False when it went away meanwhile, or is none any more."""
    here = levels[-1]
    try:
        descriptor = open_folder(name, here.descriptor)
    except OSError as error:
        if error.errno in _WENT_AWAY:
            return False
        raise OSError(error.errno, error.strerror, here.prefix + name) from error
    levels.append(_Level(descriptor, f"{here.prefix}{name}/"))
    if len(levels) > _MOST_OPEN:
        levels[-1 - _MOST_OPEN].close()
    return True


def _go_up(levels: list[_Level]) -> None:
    """Go back to the folder above, which must be the one that we came through."""
    left = levels.pop()
    try:
        if levels and levels[-1].descriptor is None:
            above = levels[-1]
            above.descriptor = open_folder("..", left.descriptor)
            if _identity(above.descriptor) != above.identity:
                raise OSError(errno.ESTALE, "it was moved while it was looked at", left.prefix)
    finally:
        left.close()


def _check_room(num_entries: int, num_bytes: int) -> None:
    if num_entries > MOST_ENTRIES:
        raise OSError(errno.EFBIG, f"more than {MOST_ENTRIES:,} entries")
    if num_bytes > MOST_PATH_BYTES:
        raise OSError(errno.EFBIG, f"its paths have more than {MOST_PATH_BYTES:,} bytes together")


def _identity(descriptor: int) -> tuple[int, int]:
    info = os.fstat(descriptor)
    return info.st_dev, info.st_ino


def remove_folder(folder: Path) -> None:
    """Remove a folder whatever a jail left in it; no word if something stays."""
    with suppress(OSError):
        _remove(folder)
    is_link = os.path.islink(folder)  # which chmod would follow
    for command in (["rm", "-rf"], *([] if is_link else [["chmod", "-R", "u+rwX"], ["rm", "-rf"]])):
        if os.path.lexists(folder):  # what could not be moved goes where it is
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)


def _remove(folder: Path) -> None:
    """One pass over all that is in it."""
    token = os.urandom(8).hex()
    names = (f".{token}-{number}" for number in count())
    top = open_folder(folder, needed=CHANGE)
    try:
        waiting = _clear(top)
        while waiting:
            name = waiting.pop()
            here = open_folder(name, top, CHANGE)
            try:
                for inner in _clear(here):
                    moved = next(names)
                    os.close(open_folder(inner, here, CHANGE))  # only who may write it may move it
                    os.rename(inner, moved, src_dir_fd=here, dst_dir_fd=top)
                    waiting.append(moved)
            finally:
                os.close(here)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _clear(folder: int) -> list[str]:
    """Remove what is in an open folder but the folders that are not empty; their names."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    left = []
    for name, is_folder in found:
        try:
            (os.rmdir if is_folder else os.unlink)(name, dir_fd=folder)
        except OSError as error:
            if not is_folder or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            left.append(name)
    return left


def remove(path: Path) -> None:
    """Remove an entry whatever a jail made of it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    remove_folder(path)
    if os.path.lexists(path):
        raise OSError(errno.ENOTEMPTY, "it cannot be removed", str(path)[:200])


def empty(folder: Path) -> None:
    """Remove everything in a folder; the folder itself stays, for it may be mounted."""
    for name in os.listdir(folder):
        remove(folder / name)
