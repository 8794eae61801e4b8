"""What lies in the cache, and its removal: only what is ours, and nothing that a living process uses.

Ours are entries of the known folders below whose names and shape are those that this
package gives; everything else stays, whatever folder ``COMPOSER_RL_CACHE`` names. No
symbolic link is followed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from composer_replication.sandbox.process_folder import abandoned_folders, remove_abandoned

SECONDS_PER_DAY = 86400.0
SCRATCH = "scratch"
_DOOMED = ".pruned-"


@dataclass(frozen=True, slots=True)
class Kind:
    """One folder of the cache.

    Attributes:
        name: of the folder.
        pattern: names of its entries.
        lock: names the lock that is held while an entry is made; ``{}`` stands for the entry.
        mark: a file that an entry which is a folder must hold; empty for none.
        is_shelf: readers hold the folder as a whole instead of single entries.
        can_be_made_again: by fetching or building; otherwise it goes with ``include_reports`` only.
    """

    name: str
    pattern: str
    lock: str = ""
    mark: str = ""
    is_shelf: bool = False
    can_be_made_again: bool = True


_RELEASE = r"[a-z0-9]+(-[a-z0-9]+)*-[0-9][\w.+!]*"
KINDS = (
    Kind("task-stores", r"[0-9a-f]{16}", lock="task-store-{}"),
    Kind("environments", r"[0-9a-f]{24}-[0-9a-f]{8}", lock="environment-{}"),
    Kind("models", r".+-[0-9a-f]{16}|\.unpack-\w+", lock="models"),
    Kind("resolutions", r"[0-9a-f]{64}\.json"),
    Kind("validations", r"[0-9a-f]{32}\.jsonl"),
    Kind("git", r"[0-9a-f]{16}-([0-9a-f]{40}|[0-9a-f]{64})|fetch-\w+", lock="git-{}"),
    Kind("sdists", _RELEASE, mark="SHA256", is_shelf=True),
    Kind("wheels", _RELEASE, mark="SHA256", is_shelf=True),
    Kind("crash", r"composer-rl-crash-.+\.txt", can_be_made_again=False),
)


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Something of ours in the cache, or a scratch folder that a killed process left."""

    kind: str
    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays although it lies in a folder that was looked at."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed (or would be), and what was left and why."""

    removed: tuple[CacheEntry, ...]
    kept: tuple[Kept, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.removed)


def survey(folder: Path) -> tuple[list[CacheEntry], list[Kept]]:
    """Everything of ours in the cache ``folder``, and what lies in its known folders and is not ours."""
    entries: list[CacheEntry] = []
    kept: list[Kept] = []
    for kind in KINDS:
        shelf = folder / kind.name
        if shelf.is_symlink():
            kept.append(Kept(shelf, "a symbolic link"))
        elif shelf.is_dir():
            for path in sorted(shelf.iterdir()):
                if _is_ours(path, kind):
                    entries.append(CacheEntry(kind.name, path, tree_bytes(path)))
                else:
                    kept.append(Kept(path, "not made by composer-rl"))
    return entries, kept


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
    entries, kept = survey(folder)
    removed: list[CacheEntry] = []
    limit = time.time() - older_than_days * SECONDS_PER_DAY
    kinds = {kind.name: kind for kind in KINDS}
    for done, entry in enumerate(entries):
        if progress is not None:
            progress(done, len(entries), entry.path.name)
        kind = kinds[entry.kind]
        if not (kind.can_be_made_again or include_reports):
            reason = "a crash report, which cannot be made again: --all"
        else:
            reason = _remove(entry, kind, folder, limit if older_than_days else None, is_dry_run=is_dry_run)
        if reason:
            kept.append(Kept(entry.path, reason))
        else:
            removed.append(entry)
    removed += _remove_scratch(is_dry_run=is_dry_run)
    if progress is not None and entries:
        progress(len(entries), len(entries), "done")
    return Pruned(tuple(removed), tuple(kept))


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
    is_file = kind.name in ("resolutions", "validations", "crash")
    return path.is_file() if is_file else path.is_dir() and (not kind.mark or (path / kind.mark).is_file())


def _remove(entry: CacheEntry, kind: Kind, cache: Path, limit: float | None, *, is_dry_run: bool) -> str:
    """Remove one entry; the reason why it stays, or an empty string."""
    with ExitStack() as stack:
        try:
            if limit is not None and entry.path.lstat().st_mtime > limit:
                return "used since then"
            for path in _locks(entry.path, kind, cache):
                _lock_alone(path, stack)
            if not is_dry_run:
                _delete(entry.path)
        except BlockingIOError:
            return "in use"
        except FileNotFoundError:  # another prune was faster
            return "" if is_dry_run else "already gone"
        except OSError as error:
            return f"cannot be removed: {error.strerror or error}"
    return ""


def _locks(path: Path, kind: Kind, cache: Path) -> Iterator[Path]:
    """What must be nobody else's before an entry goes."""
    if kind.lock:
        yield cache / "locks" / f"{kind.lock.format(path.name)}.lock"
    yield path.parent if kind.is_shelf else path


def _lock_alone(path: Path, stack: ExitStack) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        if path.suffix == ".lock":
            return  # never taken by anybody
        raise
    stack.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _delete(path: Path) -> None:
    if path.is_file():
        path.unlink()
        return
    doomed = path
    if not path.name.startswith(_DOOMED):
        doomed = path.with_name(f"{_DOOMED}{os.getpid()}-{path.name}")
        path.rename(doomed)
    shutil.rmtree(doomed)


def _remove_scratch(*, is_dry_run: bool) -> Sequence[CacheEntry]:
    removed = []
    for path in abandoned_folders():
        entry = CacheEntry(SCRATCH, path, tree_bytes(path))
        if is_dry_run or remove_abandoned(path):
            removed.append(entry)
    return removed
