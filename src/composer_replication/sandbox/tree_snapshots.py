"""Copies of a tree to come back to, beside the jail and out of its sight."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from composer_replication.errors import SandboxFileError
from composer_replication.sandbox.closed_folders import LOOK, open_folder, open_to_owner
from composer_replication.sandbox.folder_removal import remove_folder
from composer_replication.sandbox.folder_walk import walk
from composer_replication.sandbox.fresh_folders import empty

_COPY = ["cp", "--archive", "--reflink=auto", "--no-target-directory", "--"]
_LONGEST_PATH = 4095  # what the system takes, without the NUL at its end
_READ = 0o400


class TreeSnapshots:
    """The snapshots of one tree. Call only while no process of the jail is alive.

    Args:
        tree: resolved.
        folder: where the copies lie; made with the first one.

    Both methods raise ``OSError`` with what ``cp`` said; after a failed ``restore`` the tree is not whole.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self._tree = tree
        self._folder = folder
        self._names: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def take(self) -> str:
        """Copy the tree; on a file system with copy on write only what changes later costs anything.

        Raises:
            SandboxFileError: a path of it is too long for a copy, or there are too many of them (CR0309).
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"snapshot-{len(self._names)}"
        try:
            _copy_whatever_its_modes(self._tree, self._folder / name)
        except BaseException:
            remove_folder(self._folder / name)
            raise
        self._names.append(name)
        return name

    def restore(self, name: str) -> None:
        """Empty the tree and copy the snapshot back; the folder itself stays, for it may be mounted."""
        open_to_owner(self._tree)
        empty(self._tree)
        _copy_whatever_its_modes(self._folder / name, self._tree)


def copy_folder(source: Path, target: Path) -> None:
    """Copy what is in one folder into another, on write where the file system can.

    Raises:
        OSError: with what ``cp`` said.
    """
    done = subprocess.run(
        [*_COPY, str(source), str(target)], capture_output=True, text=True, check=False, errors="replace"
    )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OSError(said[:300])


def _copy_whatever_its_modes(source: Path, target: Path) -> None:
    """As ``copy_folder``; what a command closed to our own user is opened meanwhile, and closed again in both.

    Raises:
        SandboxFileError: a path is too long for a copy, or there are too many of them (CR0309).
        OSError: with what ``cp`` said.
    """
    room = _LONGEST_PATH - max(len(os.fsencode(folder)) for folder in (source, target)) - 1
    closed: list[tuple[Path, int]] = []
    try:
        for path, info in _all_of(source, room):
            if _is_closed(info):
                mode = stat.S_IMODE(info.st_mode)
                closed.append((Path(path), mode))
                if not stat.S_ISDIR(info.st_mode):  # folders are opened by whoever looks into them
                    os.chmod(source / path, mode | _READ)
        copy_folder(source, target)
        _put_back(target, closed)
    finally:
        _put_back(source, closed)


def _all_of(root: Path, room: int) -> Iterator[tuple[str, os.stat_result]]:
    """A folder and everything in it, by paths of at most ``room`` bytes.

    Raises:
        SandboxFileError: a path is longer, or there are too many of them (CR0309).
    """
    yield ".", os.lstat(root)
    try:
        for path, info in walk(open_folder(root)):
            if len(os.fsencode(path)) > room:
                raise OSError(errno.ENAMETOOLONG, "a path in it is too long")
            yield path, info
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EFBIG):
            raise
        why = f"the tree cannot be kept: {error.strerror}."
        raise SandboxFileError("CR0309", why, where=str(root), fix="list the tree") from error


def _is_closed(info: os.stat_result) -> bool:
    """Whether our own user may not read what is his; as root we read whatever is another one's."""
    if info.st_uid != os.geteuid():
        return False
    needed = {stat.S_IFDIR: LOOK, stat.S_IFREG: _READ}.get(stat.S_IFMT(info.st_mode), 0)
    return info.st_mode & needed != needed


def _put_back(root: Path, closed: list[tuple[Path, int]]) -> None:
    for path, mode in reversed(closed):  # what is in a folder before the folder
        with suppress(OSError):
            os.chmod(root / path, mode)
