"""What lies in the cache, and its removal: only what is ours, and nothing that a living process uses.

Ours are entries of the known folders below whose names and shape are those that this
package gives; everything else stays, whatever folder ``COMPOSER_RL_CACHE`` names. No
symbolic link is followed.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from composer_replication.sandbox.process_folder import abandoned_folders, remove_abandoned

SECONDS_PER_DAY = 86400.0
SCRATCH = "scratch"
_DOOMED = ".pruned-"


@dataclass(frozen=True, slots=True)
class Kind:
    """One folder of the cache, by the names of its entries; ``lock`` is held while one is made (``{}``: its name).

    A folder of a shelf holds the file ``SHA256``, and readers hold the shelf as a whole.
    """

    name: str
    pattern: str
    lock: str = ""
    is_shelf: bool = False


_RELEASE = r"[a-z0-9]+(-[a-z0-9]+)*-[0-9][\w.+!]*"
KINDS = (
    Kind("task-stores", r"[0-9a-f]{16}", lock="task-store-{}"),
    Kind("environments", r"[0-9a-f]{24}-[0-9a-f]{8}", lock="environment-{}"),
    Kind("models", r".+-[0-9a-f]{16}|\.unpack-\w+", lock="models"),
    Kind("resolutions", r"[0-9a-f]{64}\.json"),
    Kind("validations", r"[0-9a-f]{32}\.jsonl"),
    Kind("git", r"[0-9a-f]{16}-([0-9a-f]{40}|[0-9a-f]{64})|fetch-\w+", lock="git-{}"),
    Kind("sdists", _RELEASE, is_shelf=True),
    Kind("wheels", _RELEASE, is_shelf=True),
    Kind("crash", r"composer-rl-crash-.+\.txt"),
)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Something in a known folder of the cache, or a scratch folder that a killed process left; ``reason`` is why it stays."""

    kind: str
    path: Path
    num_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed (or would be), and what was left and why."""

    removed: tuple[CacheEntry, ...]
    kept: tuple[CacheEntry, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.removed)


def prune(
    folder: Path,
    *,
    include_reports: bool = False,
    older_than_days: float = 0.0,
    is_dry_run: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Pruned:
    """Remove what can be fetched or made again, and scratch folders whose process is gone.

    An entry is locked against its readers (``hold``) and its makers (``cache_lock``), renamed,
    and then removed, so that nobody ever sees half of it; an interrupted removal is finished by
    the next call.

    Args:
        folder: the cache.
        include_reports: crash reports too, which nothing brings back.
        older_than_days: leave what was used since then. The time of last use is the time stamp
            of the entry, which every use renews; the scratch folders do not ask for it.
        is_dry_run: find out, remove nothing.
        progress: told (done, total, path).
    """
    found: list[tuple[Kind, Path]] = []
    for kind in KINDS:
        shelf = folder / kind.name
        inside = sorted(shelf.iterdir()) if shelf.is_dir() and not shelf.is_symlink() else []
        found += [(kind, path) for path in ([shelf] if shelf.is_symlink() else inside)]
    limit = time.time() - older_than_days * SECONDS_PER_DAY if older_than_days else math.inf
    entries: list[CacheEntry] = []
    for done, (kind, path) in enumerate(found):
        if progress is not None:
            progress(done, len(found), path.name)
        num_bytes = tree_bytes(path)
        if not _is_ours(path, kind):
            reason = "a symbolic link" if path.name == kind.name else "not made by composer-rl"
        elif kind.name == "crash" and not include_reports:
            reason = "a crash report, which cannot be made again: --all"
        else:
            reason = _remove(path, kind, folder, limit, is_dry_run=is_dry_run)
        entries.append(CacheEntry(kind.name, path, num_bytes, reason))
    for path in abandoned_folders():
        scratch = CacheEntry(SCRATCH, path, tree_bytes(path))
        if is_dry_run or remove_abandoned(path):
            entries.append(scratch)
    if progress is not None and found:
        progress(len(found), len(found), "done")
    removed = tuple(entry for entry in entries if not entry.reason)
    return Pruned(removed, tuple(entry for entry in entries if entry.reason))


def tree_bytes(path: Path) -> int:
    """The sizes of all regular files at or below ``path``, in bytes; links count nothing."""
    total = 0
    below = [] if path.is_symlink() else os.walk(path)
    for one in (path, *(Path(root, name) for root, _, names in below for name in names)):
        with suppress(OSError):  # gone meanwhile
            info = one.lstat()
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total


def _is_ours(path: Path, kind: Kind) -> bool:
    if path.is_symlink():
        return False
    if path.name.startswith(_DOOMED):
        return True
    if not re.fullmatch(kind.pattern, path.name):
        return False
    if kind.name in ("resolutions", "validations", "crash"):
        return path.is_file()
    return path.is_dir() and (not kind.is_shelf or (path / "SHA256").is_file())


def _remove(path: Path, kind: Kind, cache: Path, limit: float, *, is_dry_run: bool) -> str:
    """Remove one entry; the reason why it stays, or an empty string."""
    held = path.parent if kind.is_shelf else path
    maker = cache / "locks" / f"{kind.lock.format(path.name)}.lock"
    with ExitStack() as stack:
        try:
            if path.lstat().st_mtime > limit:
                return "used since then"
            for locked in [maker, held] if kind.lock and maker.exists() else [held]:
                descriptor = os.open(locked, os.O_RDONLY | os.O_NOFOLLOW)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_dry_run:
                _delete(path)
        except BlockingIOError:
            return "in use"
        except FileNotFoundError:  # another prune was faster
            return "" if is_dry_run else "already gone"
        except OSError as error:
            return f"cannot be removed: {error.strerror or error}"
    return ""


def _delete(path: Path) -> None:
    if path.is_file():
        path.unlink()
        return
    doomed = path
    if not path.name.startswith(_DOOMED):
        doomed = path.with_name(f"{_DOOMED}{os.getpid()}-{path.name}")
        path.rename(doomed)
    shutil.rmtree(doomed)
