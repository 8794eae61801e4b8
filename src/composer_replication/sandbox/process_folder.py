"""One temporary folder a process, so that nothing outlives a kill for long.

Every tree that is judged and every jail's home lies below it. The process holds a lock on
the folder that dies with it, whatever kills it; the next process that needs such a folder
removes those that nobody holds.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PREFIX = "composer-rl-scratch-"
BAIT_PREFIX = "composer-rl-bait-"  # must be reachable by other users, so it stands on its own
_YOUNG_SECONDS = 60.0  # a folder is made a moment before it is locked
_own: dict[int, Path] = {}


def process_folder() -> Path:
    """The folder of this process, below the system's temporary folder; made at first use.

    Raises:
        OSError: it cannot be made (no space, no permission).
    """
    pid = os.getpid()  # a forked child makes its own
    folder = _own.get(pid)
    if folder is None or not folder.is_dir():
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        hold(folder)
        _own[pid] = folder
        atexit.register(_remove_at_exit, pid, folder)
    return folder


def hold(folder: Path) -> int:
    """Lock ``folder`` against ``sweep`` as long as this process lives or until the descriptor is closed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def sweep() -> list[Path]:
    """Remove our folders that a killed process left in the temporary folder; returns them."""
    removed = []
    for folder in abandoned_folders():
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            removed.append(folder)
    return removed


def abandoned_folders() -> Iterator[Path]:
    """Our folders in the temporary folder whose process is gone; each is locked while it is looked at."""
    root = Path(tempfile.gettempdir())
    for folder in (*root.glob(f"{PREFIX}*"), *root.glob(f"{BAIT_PREFIX}*")):
        with suppress(OSError):  # somebody else's, or gone by now
            info = folder.lstat()
            if info.st_uid != os.getuid() or time.time() - info.st_mtime < _YOUNG_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(descriptor)


def _remove_at_exit(pid: int, folder: Path) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
