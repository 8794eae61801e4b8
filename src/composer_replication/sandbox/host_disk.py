"""Room on the disk of the machine for what a command may write: where it lacks, a failure says nothing of the code."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from composer_replication.errors import SandboxFailure

ENOUGH_BYTES = 256 * 1024**2
"""So much must be there at the start of a command that may write more."""
LEAST_BYTES = 1 << 20
"""Below it, while a command runs, somebody else has used the room up."""


def require_room(folders: Iterable[Path], num_bytes: int) -> None:
    """Is there room for ``num_bytes``, and for one file more, on the disk of each folder?

    Raises:
        SandboxFailure: there is not (CR0104).
    """
    for folder in folders:
        with suppress(PermissionError, FileNotFoundError):  # a command has closed or removed it
            disk = os.statvfs(folder)
            free = disk.f_bavail * disk.f_frsize
            if disk.f_blocks and free < num_bytes:
                raise _full(f"has {_said(free)} left, and a command may write {_said(num_bytes)}", folder)
            if disk.f_files and not disk.f_favail:
                raise _full("takes no further file", folder)


def _said(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _full(what: str, folder: Path) -> SandboxFailure:
    return SandboxFailure(
        "CR0104",
        f"the disk of a sandbox {what}.",
        where=str(folder),
        fix="free some space, or point TMPDIR or COMPOSER_RL_CACHE to a larger disk.",
    )
