"""Copies of a tree to come back to, beside the jail and out of its sight."""

from __future__ import annotations

import subprocess
from pathlib import Path

from composer_replication.sandbox.fresh_folders import empty
from composer_replication.sandbox.private_folders import remove_folder

_COPY = ["cp", "--archive", "--reflink=auto", "--no-target-directory", "--"]


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
        """Copy the tree; on a file system with copy on write only what changes later costs anything."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"snapshot-{len(self._names)}"
        try:
            copy_folder(self._tree, self._folder / name)
        except OSError:
            remove_folder(self._folder / name)
            raise
        self._names.append(name)
        return name

    def forget(self) -> None:
        """Remove all snapshots."""
        self._names = []
        if self._folder.exists():
            remove_folder(self._folder)

    def restore(self, name: str) -> None:
        """Empty the tree and copy the snapshot back; the folder itself stays, for it may be mounted."""
        empty(self._tree)
        copy_folder(self._folder / name, self._tree)


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
