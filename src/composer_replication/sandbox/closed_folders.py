"""Folders that hostile code closed to their owner: opened to him again, never through a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_HELD = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
LOOK, CHANGE = 0o500, 0o700  # what it takes to go through a folder, and to change what is in it


def hold_folder(folder: Path | str, above: int | None = None) -> int:
    """A descriptor that names a folder without a right to it; ``above`` is the folder that ``folder`` is relative to.

    Raises:
        OSError: it is missing, or no folder.
    """
    return os.open(folder, _HELD, dir_fd=above)


def open_held(descriptor: int, needed: int = CHANGE) -> None:
    """Give a held folder's owner every right to it, where one of ``needed`` is missing."""
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode & needed != needed:
        os.chmod(f"/proc/self/fd/{descriptor}", mode | CHANGE)


def open_to_owner(folder: Path | str, needed: int = CHANGE) -> None:
    """Give a folder's owner every right to it, where one of ``needed`` is missing.

    Raises:
        OSError: it is missing, no folder, or somebody else's.
    """
    descriptor = hold_folder(folder)
    try:
        open_held(descriptor, needed)
    finally:
        os.close(descriptor)


def open_to_us(descriptor: int, needed: int = LOOK) -> None:
    """As ``open_held``, where the folder is our own user's: what is somebody else's we use as root, or not at all."""
    if os.fstat(descriptor).st_uid == os.geteuid():
        open_held(descriptor, needed)


def open_folder(folder: Path | str, above: int | None = None, needed: int = LOOK) -> int:
    """Open a folder to list it, links unfollowed; one that our own user closed is opened to him.

    Raises:
        OSError: it is missing, no folder, or closed to us.
    """
    held = hold_folder(folder, above)
    try:
        open_to_us(held, needed)
        return os.open(f"/proc/self/fd/{held}", _READ)
    finally:
        os.close(held)
