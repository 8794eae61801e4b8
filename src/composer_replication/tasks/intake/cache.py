"""One folder for everything that can be fetched or made again (archives, wheels, environments), and what removes it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import platformdirs

from composer_replication.sandbox.process_folder import abandoned_folders, remove_abandoned

CACHE_VARIABLE = "COMPOSER_RL_CACHE"
_LEAST_BYTES = 256 * 1024
"""With less left a test run writes nothing to speak of; the disk limit of a sandbox is met long before."""


def cache_folder() -> Path:
    """The cache folder, made if absent: ``COMPOSER_RL_CACHE``, else the user's cache for ``composer-rl``.

    Nothing of it is pruned while a process lives that has asked for it.
    """
    override = os.environ.get(CACHE_VARIABLE, "")
    folder = Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("composer-rl"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    _held(folder, os.getpid())
    return folder


@cache
def _held(folder: Path, _process: int) -> int:
    """A descriptor with a shared lock on a folder, which dies with this process; a forked one takes a lock of its own."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Hold one named lock of the cache against threads and processes; it dies with the process that holds it."""
    folder = cache_folder() / "locks"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sha256_of(data: bytes) -> str:
    """The hexadecimal sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """The hexadecimal sha256 of a file, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def put_file(path: Path, data: bytes) -> None:
    """Write a file so that it is whole or absent; no fsync, as whatever reads these files checks their hash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def refuse_when_full(where: Path) -> None:
    """Raise ``OSError`` where nothing is left of the disk that a test run used, on which its failures say nothing."""
    disk = os.statvfs(where)
    if disk.f_bavail * disk.f_frsize < _LEAST_BYTES or (disk.f_files and not disk.f_favail):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(where))


def refuse_full_disk(said: str, where: Path) -> None:
    """Raise ``OSError`` where a program that failed has said (with LC_ALL=C) that it had no space, or no quota, in ``where``.

    Of its standard error ``said`` the lines of a server (``remote:``) speak of another machine's disk.
    """
    own = "\n".join(line for line in said.splitlines() if not line.lstrip().startswith("remote:"))
    for number in (errno.ENOSPC, errno.EDQUOT):
        if os.strerror(number) in own:
            raise OSError(number, os.strerror(number), str(where))


# --- What lies in the cache, and its removal: only what is ours, and nothing that a living process uses.

_DOOMED = ".pruned-"
_RELEASE = r"[a-z0-9]+(-[a-z0-9]+)*-[0-9][\w.+!]*"
_ENTRIES = {
    "task-stores": r"[0-9a-f]{16}",
    "environments": r"[0-9a-f]{24}-[0-9a-f]{8}",
    "models": r".+-[0-9a-f]{16}|\.unpack-\w+",
    "resolutions": r"[0-9a-f]{64}\.json",
    "git": r"[0-9a-f]{16}-[0-9a-f]{40,64}|fetch-\w+",
    "sdists": _RELEASE,
    "wheels": _RELEASE,
}
"""By folder of the cache the names that this package gives to entries; everything else in it stays."""


def prune(folder: Path, *, is_dry_run: bool = False) -> tuple[dict[Path, int], bool]:
    """Remove what can be fetched or made again, and scratch folders whose process is gone.

    The answer is what was removed (or would be) with its size in bytes, and whether another process uses the cache: then
    all of it stays, and none begins to use it meanwhile. An entry is renamed before it is removed, so that nobody ever
    sees half of it; an interrupted removal is finished by the next call. No link is followed.
    ``is_dry_run``: find out, remove nothing.
    """
    removed: dict[Path, int] = {}
    lock, is_in_use = _held(folder.resolve(), os.getpid()), False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_in_use = True
    shelves = [] if is_in_use else [folder / kind for kind in _ENTRIES if not (folder / kind).is_symlink()]
    for path in [path for shelf in shelves for path in sorted(shelf.glob("*")) if _is_ours(path)]:
        removed[path] = tree_bytes(path)
        if not is_dry_run:
            doomed = path.with_name(f"{_DOOMED}{path.name.removeprefix(_DOOMED)}")
            path.rename(doomed)
            doomed.unlink() if doomed.is_file() else shutil.rmtree(doomed)
    fcntl.flock(lock, fcntl.LOCK_SH)
    for path in abandoned_folders():
        num_bytes = tree_bytes(path)
        if is_dry_run or remove_abandoned(path):
            removed[path] = num_bytes
    return removed, is_in_use


def tree_bytes(path: Path) -> int:
    """The sizes of all regular files at or below ``path``, in bytes; links count nothing."""
    total = 0
    below = [] if path.is_symlink() else os.walk(path)
    for one in (path, *(Path(root, name) for root, _, names in below for name in names)):
        with suppress(OSError):  # gone meanwhile
            info = one.lstat()
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total


def _is_ours(path: Path) -> bool:
    """Whether it is called as we call what we make, and is no link; what was fetched from an index has its hash beside it."""
    kind = path.parent.name
    is_called = path.name.startswith(_DOOMED) or re.fullmatch(_ENTRIES[kind], path.name) is not None
    is_whole = kind not in ("sdists", "wheels") or (path / "SHA256").is_file()
    return is_called and is_whole and not path.is_symlink()
