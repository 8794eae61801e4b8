"""One folder for everything that can be fetched or made again: archives, wheels, environments."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "COMPOSER_RL_CACHE"
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
