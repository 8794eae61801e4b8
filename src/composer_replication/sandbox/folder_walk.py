"""Look through a folder that hostile code fills: any depth, few descriptors, links unfollowed, and no more than so much.

A path may be longer than the system takes, so each folder is opened relative to the one above it. Of those on the way
the deepest are held; to one further up the way back is ``..``, and it must be the folder that we came through.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from composer_replication.sandbox.closed_folders import open_folder

MOST_ENTRIES = 250_000
MOST_PATH_BYTES = 32 * 1024**2
_MOST_OPEN = 32
_WENT_AWAY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

Found = tuple[str, os.stat_result]


@dataclass(slots=True)
class _Level:
    """A folder on the way down; ``folders`` in it are still to be looked into."""

    descriptor: int | None
    identity: tuple[int, int]
    prefix: str
    folders: list[str] = field(default_factory=list)


class _Way:
    """The folders from the start down to where we are; only the last ``_MOST_OPEN`` are held open."""

    def __init__(self, start: int, prefix: str) -> None:
        self.levels = [_Level(start, _identity(start), prefix)]

    def down(self, name: str) -> bool:
        """Go into a folder; False when it went away meanwhile, or is none any more."""
        here = self.levels[-1]
        try:
            descriptor = open_folder(name, here.descriptor)
        except OSError as error:
            if error.errno in _WENT_AWAY:
                return False
            raise OSError(error.errno, error.strerror, here.prefix + name) from error
        self.levels.append(_Level(descriptor, _identity(descriptor), f"{here.prefix}{name}/"))
        if len(self.levels) > _MOST_OPEN:
            _close(self.levels[-1 - _MOST_OPEN])
        return True

    def up(self) -> None:
        """Go back to the folder above."""
        left = self.levels.pop()
        try:
            if self.levels and self.levels[-1].descriptor is None:
                _open_above(left, self.levels[-1])
        finally:
            _close(left)

    def close(self) -> None:
        for level in self.levels:
            _close(level)


def walk(start: int, prefix: str = "") -> Iterator[Found]:
    """Every entry below an open folder, which is closed at the end; a folder comes before what is in it.

    What goes away or becomes something else meanwhile is left out. Closed folders of our own user are opened.

    Args:
        start: its descriptor.
        prefix: what each path begins with.

    Raises:
        OSError: more than ``MOST_ENTRIES``, or paths of more than ``MOST_PATH_BYTES`` together; a folder cannot be
            read, or was moved while we were in it.
    """
    way = _Way(start, prefix)
    try:
        num_entries = num_bytes = 0
        is_new = True
        while way.levels:
            here = way.levels[-1]
            if is_new:
                for path, info in _scan(here):
                    num_entries += 1
                    num_bytes += len(os.fsencode(path))
                    _check_room(num_entries, num_bytes)
                    yield path, info
            if is_new := bool(here.folders):
                is_new = way.down(here.folders.pop())
            else:
                way.up()
    finally:
        way.close()


def _scan(level: _Level) -> Iterator[Found]:
    assert level.descriptor is not None
    with os.scandir(level.descriptor) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    level.folders.append(entry.name)
                yield level.prefix + entry.name, info


def _check_room(num_entries: int, num_bytes: int) -> None:
    if num_entries > MOST_ENTRIES:
        raise OSError(errno.EFBIG, f"more than {MOST_ENTRIES:,} entries")
    if num_bytes > MOST_PATH_BYTES:
        raise OSError(errno.EFBIG, f"its paths have more than {MOST_PATH_BYTES:,} bytes together")


def _open_above(left: _Level, above: _Level) -> None:
    above.descriptor = open_folder("..", left.descriptor)
    if _identity(above.descriptor) != above.identity:
        raise OSError(errno.ESTALE, "it was moved while it was looked at", left.prefix)


def _identity(descriptor: int) -> tuple[int, int]:
    info = os.fstat(descriptor)
    return info.st_dev, info.st_ino


def _close(level: _Level) -> None:
    if level.descriptor is not None:
        os.close(level.descriptor)
        level.descriptor = None
