"""A disk that was full for a program that we started (pip, venv, git, tests) is named as one that was full for us."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_SAID = {
    os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT)
}  # such programs run with LC_ALL=C

_LEAST_BYTES = 256 * 1024
"""With less left a test run writes nothing to speak of; the disk limit of a sandbox is met long before."""


def refuse_when_full(where: Path) -> None:
    """Look at the disk that a test run used, before what it wrote is removed: its failures would say nothing of the code.

    Raises:
        OSError: nothing is left of the disk on which ``where`` lies.
    """
    disk = os.statvfs(where)
    if disk.f_bavail * disk.f_frsize < _LEAST_BYTES or (disk.f_files and not disk.f_favail):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(where))


def refuse_full_disk(said: str, where: Path) -> None:
    """Look through what a program that failed has said.

    Args:
        said: its standard error; lines of a server (``remote:``) speak of another machine's disk.
        where: the folder that it wrote into.

    Raises:
        OSError: it had no space, or no quota was left; the command line makes CR0104 of it.
    """
    own = "\n".join(line for line in said.splitlines() if not line.lstrip().startswith("remote:"))
    for words, number in _SAID.items():
        if words in own:
            raise OSError(number, words, str(where))
