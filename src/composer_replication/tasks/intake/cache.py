"""One folder for everything that can be fetched or made again: archives, wheels, environments."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "COMPOSER_RL_CACHE"
_SAID = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT)}
"""What a program says on a full disk: ours run with LC_ALL=C."""
_LEAST_BYTES = 256 * 1024
"""With less left a test run writes nothing to speak of; the disk limit of a sandbox is met long before."""
_held: dict[Path, int] = {}
_held_lock = threading.Lock()


def cache_folder() -> Path:
    """The cache folder, made if absent: ``COMPOSER_RL_CACHE``, else the user's cache for ``composer-rl``."""
    override = os.environ.get(CACHE_VARIABLE, "")
    folder = Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("composer-rl"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


@contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Hold one named lock of the cache; threads and processes wait for each other.

    The lock dies with the process that holds it, so a crash blocks nobody.
    """
    folder = cache_folder() / "locks"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def hold(folder: Path) -> bool:
    """Keep a folder of the cache from ``prune`` until this process ends; False when it is not there.

    A shared lock on the folder itself, which dies with the process. Its time stamp becomes now,
    so that the time of last use can be read from it.
    """
    with _held_lock:
        while True:
            try:
                descriptor = _held.get(folder)
                if descriptor is None:
                    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                    _held[folder] = descriptor
                if os.path.samestat(os.fstat(descriptor), folder.stat()):
                    _touch(descriptor)
                    return True
            except (FileNotFoundError, NotADirectoryError):
                _let_go(folder)
                return False
            _let_go(folder)  # it was pruned, or made anew, since it was opened


def _let_go(folder: Path) -> None:
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def _touch(descriptor: int) -> None:
    with suppress(PermissionError):  # a cache that somebody else filled
        os.utime(descriptor)


def sha256_of(data: bytes) -> str:
    """The hexadecimal sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """The hexadecimal sha256 of a file, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def put_file(path: Path, data: bytes) -> None:
    """Write a file so that it is whole or absent, also with several writers of the same file.

    No fsync: whatever reads these files checks their hash.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def refuse_when_full(where: Path) -> None:
    """Look at the disk that a test run used, before what it wrote is removed: on a full one its failures say nothing.

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
