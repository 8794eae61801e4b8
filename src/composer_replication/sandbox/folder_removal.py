"""Remove a folder whatever a jail left in it: any depth, any length of a path, closed folders.

A folder in it is moved to its top before it is looked into. So nothing is ever deep, three descriptors do, and the work
grows with the number of entries alone. Call only while no process of the jail is alive.
"""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path

from composer_replication.sandbox.closed_folders import CHANGE, hold_folder, open_folder, open_to_us


def remove_folder(folder: Path) -> None:
    """Remove a folder whatever a jail left in it; no word if something stays."""
    with suppress(OSError):
        _remove(folder)
    if os.path.lexists(folder):
        _remove_by_program(folder)


def _remove(folder: Path) -> None:
    """One pass over all that is in it.

    Raises:
        OSError: something cannot be removed, or not be moved (to another file system, say).
    """
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
                    _open(inner, here)  # only who may write a folder may move it
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
        if not is_folder:
            os.unlink(name, dir_fd=folder)
        elif not _is_removed(name, folder):
            left.append(name)
    return left


def _is_removed(name: str, above: int) -> bool:
    try:
        os.rmdir(name, dir_fd=above)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _open(name: str, above: int) -> None:
    held = hold_folder(name, above)
    try:
        open_to_us(held, CHANGE)
    finally:
        os.close(held)


def _remove_by_program(folder: Path) -> None:
    """What cannot be moved goes where it is."""
    is_link = os.path.islink(folder)  # which chmod would follow
    for command in (["rm", "-rf"], *([] if is_link else [["chmod", "-R", "u+rwX"], ["rm", "-rf"]])):
        if os.path.lexists(folder):
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)
