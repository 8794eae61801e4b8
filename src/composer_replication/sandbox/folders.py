"""Folders that hostile code fills: handed over, measured, looked through, cleared, given back and removed; no link is ever followed.

The tree is the caller's; the scratch folder (HOME and temporary files) is ours. Everything that changes a folder runs
only while no process of the jail is alive, so that no link can be swapped under our hands.

A path in one may be longer than the system takes, so each folder is opened relative to the one above it. To look through
one takes few descriptors: of the folders on the way the deepest are held; to one further up the way back is ``..``, and
it must be the folder that we came through. To remove one, a folder in it is moved to its top before it is looked into:
nothing is ever deep, and the work grows with the number of entries alone.

Each command finds ``/tmp`` and ``/dev/shm`` empty, as folders of ours or as a memory of the jail's own. A jail owns the
folders that it writes: it can change their modes, attributes and flags, which emptying does not undo. And below ``/tmp``
lie mount points of the jail itself, which must stay while everything beside them goes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import lru_cache
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from composer_replication.errors import SandboxFailure

_HELD = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
LOOK, CHANGE = 0o500, 0o700  # what it takes to go through a folder, and to change what is in it
MOST_ENTRIES = 250_000
MOST_PATH_BYTES = 32 * 1024**2
_MOST_OPEN = 32
_WENT_AWAY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

Found = tuple[str, os.stat_result]
ENOUGH_BYTES = 256 * 1024**2
"""So much must be there at the start of a command that may write more."""
LEAST_BYTES = 1 << 20
"""Below it, while a command runs, somebody else has used the room up."""
_BLOCK_BYTES = 4096
_ENTRIES_BETWEEN_CLOCKS = 500
_STAT_BLOCK_BYTES = 512
_MOST_LEVELS = 200  # whoever removes the tree may recurse, and Python's limit is 1,000
_LONGEST_PATH = 3000  # of 4,096 bytes, with room for a name
_MOST_OPEN_FOLDERS = 64

SHARED_MEMORY = Path("/dev/shm")
_SMALLEST_BYTES = 1 << 12
_GET_FLAGS, _FLAG_BYTES = 0x80086601, 8  # FS_IOC_GETFLAGS where a long has 8 bytes
# What the file system itself notes on a folder as it grows, and nobody can take off: dirty, compressed blocks, an
# index, a huge file, extents, data in the inode.
_KEPT_BY_THE_SYSTEM = 0x100 | 0x200 | 0x1000 | 0x40000 | 0x80000 | 0x10000000
_Mark = tuple[object, ...]

if TYPE_CHECKING:
    _Entries = os._ScandirIterator[str]  # noqa: SLF001  its class has no public name


def hold_folder(
    folder: Path | str, above: int | None = None, needed: int = LOOK, *, whoever_owns_it: bool = False
) -> int:
    """A descriptor that names a folder, links unfollowed; ``above`` is the folder that ``folder`` is relative to.

    Where its owner lacks one of the rights ``needed`` he gets every right, if that is our own user: what is
    somebody else's we use as root, or not at all.
    """
    held = os.open(folder, _HELD, dir_fd=above)
    try:
        info = os.fstat(held)
        if info.st_mode & needed != needed and (whoever_owns_it or info.st_uid == os.geteuid()):
            os.chmod(f"/proc/self/fd/{held}", stat.S_IMODE(info.st_mode) | CHANGE)
    except BaseException:
        os.close(held)
        raise
    return held


def open_to_owner(folder: Path | str, needed: int = CHANGE) -> None:
    """Give a folder's owner, whoever that is, every right to it, where one of ``needed`` is missing."""
    os.close(hold_folder(folder, needed=needed, whoever_owns_it=True))


def open_folder(folder: Path | str, above: int | None = None, needed: int = LOOK) -> int:
    """Open a folder to list it; held as by ``hold_folder`` meanwhile."""
    held = hold_folder(folder, above, needed)
    try:
        return os.open(f"/proc/self/fd/{held}", _READ)
    finally:
        os.close(held)


class _Level:
    """A folder on the way down; ``folders`` in it are still to be looked into."""

    def __init__(self, descriptor: int, prefix: str) -> None:
        self.descriptor: int | None = descriptor
        self.info = os.fstat(descriptor)
        self.prefix = prefix
        self.folders: list[str] = []

    def entries(self) -> Iterator[Found]:
        assert self.descriptor is not None
        with os.scandir(self.descriptor) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):
                        self.folders.append(entry.name)
                    yield self.prefix + entry.name, info

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def walk(start: int, prefix: str = "") -> Iterator[Found]:
    """Every entry below an open folder, which is closed at the end; a folder comes before what is in it.

    What goes away or becomes something else meanwhile is left out. Closed folders of our own user are opened.
    Each path begins with ``prefix``.
    """
    levels = [_Level(start, prefix)]  # only the last ``_MOST_OPEN`` are held open
    try:
        num_entries = num_bytes = 0
        is_new = True
        while levels:
            here = levels[-1]
            if is_new:
                for path, info in here.entries():
                    num_entries += 1
                    num_bytes += len(os.fsencode(path))
                    if num_entries > MOST_ENTRIES:
                        raise OSError(errno.EFBIG, f"more than {MOST_ENTRIES:,} entries")
                    if num_bytes > MOST_PATH_BYTES:
                        raise OSError(
                            errno.EFBIG, f"its paths have more than {MOST_PATH_BYTES:,} bytes together"
                        )
                    yield path, info
            if is_new := bool(here.folders):
                is_new = _go_down(levels, here.folders.pop())
            else:
                _go_up(levels)
    finally:
        for level in levels:
            level.close()


def _go_down(levels: list[_Level], name: str) -> bool:
    """Go into a folder; False when it went away meanwhile, or is none any more."""
    here = levels[-1]
    try:
        descriptor = open_folder(name, here.descriptor)
    except OSError as error:
        if error.errno in _WENT_AWAY:
            return False
        raise OSError(error.errno, error.strerror, here.prefix + name) from error
    levels.append(_Level(descriptor, f"{here.prefix}{name}/"))
    if len(levels) > _MOST_OPEN:
        levels[-1 - _MOST_OPEN].close()
    return True


def _go_up(levels: list[_Level]) -> None:
    """Go back to the folder above, which must be the one that we came through."""
    left = levels.pop()
    try:
        if levels and levels[-1].descriptor is None:
            above = levels[-1]
            above.descriptor = open_folder("..", left.descriptor)
            if not os.path.samestat(os.fstat(above.descriptor), above.info):
                raise OSError(errno.ESTALE, "it was moved while it was looked at", left.prefix)
    finally:
        left.close()


def remove_folder(folder: Path) -> None:
    """Remove a folder whatever a jail left in it; no word if something stays."""
    with suppress(OSError):
        _remove(folder)
    is_link = os.path.islink(folder)  # which chmod would follow
    for command in (["rm", "-rf"], *([] if is_link else [["chmod", "-R", "u+rwX"], ["rm", "-rf"]])):
        if os.path.lexists(folder):  # what could not be moved goes where it is
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)


def _remove(folder: Path) -> None:
    """One pass over all that is in it."""
    token = os.urandom(8).hex()
    names = (f".{token}-{number}" for number in count())
    top = open_folder(folder, needed=CHANGE)
    try:
        waiting = _clear(top)
        while waiting:
            name = waiting.pop()
            here = open_folder(name, top, CHANGE)
            try:
                for inner in _clear(here):
                    moved = next(names)
                    os.close(open_folder(inner, here, CHANGE))  # only who may write it may move it
                    os.rename(inner, moved, src_dir_fd=here, dst_dir_fd=top)
                    waiting.append(moved)
            finally:
                os.close(here)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _clear(folder: int) -> list[str]:
    """Remove what is in an open folder but the folders that are not empty; their names."""
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    left = []
    for name, is_folder in found:
        try:
            (os.rmdir if is_folder else os.unlink)(name, dir_fd=folder)
        except OSError as error:
            if not is_folder or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            left.append(name)
    return left


def remove(path: Path) -> None:
    """Remove an entry whatever a jail made of it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    remove_folder(path)
    if os.path.lexists(path):
        raise OSError(errno.ENOTEMPTY, "it cannot be removed", str(path)[:200])


def empty(folder: Path) -> None:
    """Remove everything in a folder; the folder itself stays, for it may be mounted."""
    for name in os.listdir(folder):
        remove(folder / name)


def require_room(folders: Iterable[Path], num_bytes: int) -> None:
    """Is there room for ``num_bytes``, and for one file more, on the disk of each folder?"""
    for folder in folders:
        with suppress(PermissionError, FileNotFoundError):  # a command has closed or removed it
            disk = os.statvfs(folder)
            free = disk.f_bavail * disk.f_frsize
            problem = ""
            if disk.f_blocks and free < num_bytes:
                left, needed = (f"{number / 1e6:,.1f} MB" for number in (free, num_bytes))
                problem = f"has {left} left, and a command may write {needed}"
            elif disk.f_files and not disk.f_favail:
                problem = "takes no further file"
            if problem:
                why = f"the disk of a sandbox {problem}."
                fix = "free some space, or point TMPDIR or COMPOSER_RL_CACHE to a larger disk."
                raise SandboxFailure("CR0104", why, where=str(folder), fix=fix)


class UnmeasurableError(Exception):
    """A folder cannot be measured (a path too long, say): treated as over the limit."""


def _entries(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every entry below ``root`` and itself, folders before what they hold."""
    queue = [str(root)]
    yield str(root), os.lstat(root)
    while queue:
        with os.scandir(queue.pop()) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                yield entry.path, info
                if stat.S_ISDIR(info.st_mode):
                    queue.append(entry.path)


def hand_over(root: Path, uid: int | None) -> None:
    """Make ``root`` writable for ``uid`` (None: as it is) and free of hard links and of set-user-id bits.

    A hard link would let the jail change a file that also lives elsewhere: it is
    replaced by a copy, holes and all.
    """
    for path, info in _entries(root):
        if door := _door(path, info.st_mode):
            raise OSError(door)
        if stat.S_ISREG(info.st_mode) and info.st_nlink > 1:
            _replace_by_copy(path)
        if uid is not None:
            os.chown(path, uid, uid, follow_symlinks=False)
        _drop_set_id(path, info.st_mode)


def door_in(root: Path) -> str:
    """A device or a socket in a folder, as a sentence without its end, or nothing."""
    return next((door for path, info in _entries(root) if (door := _door(path, info.st_mode))), "")


def _door(path: str, mode: int) -> str:
    """What leads out of a tree."""
    if stat.S_ISSOCK(mode):
        return f"{path} is a socket, and no jail may have one"
    is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    return f"{path} is a device, and no jail may have one" if is_device else ""


def _drop_set_id(path: str, mode: int) -> None:
    if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
        os.chmod(path, stat.S_IMODE(mode) & ~(stat.S_ISUID | stat.S_ISGID))


@lru_cache(maxsize=1024)
def _way_out(path: str, _identity: tuple[int, int, int]) -> str:
    for folder, _, names in os.walk(path):
        for name in names:
            place = os.path.join(folder, name)
            with suppress(OSError):
                mode = os.lstat(place).st_mode
                if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                    return place
    return ""


def way_out(path: Path) -> str:
    """A socket or named pipe in a folder that is only to be read, or nothing.

    Being read-only does not close them: who can name one can talk to whoever listens. A folder is
    looked through once per process, and again when it has been changed itself.
    """
    info = path.stat()
    if stat.S_ISSOCK(info.st_mode) or stat.S_ISFIFO(info.st_mode):
        return str(path)
    return _way_out(str(path.resolve()), (info.st_dev, info.st_ino, info.st_ctime_ns))


def copy_file(source: str, target: str) -> None:
    """Copy a file or a named pipe with its mode, a file with its times. Byte by byte one of holes would fill the disk."""
    info = os.stat(source)
    if stat.S_ISFIFO(info.st_mode):
        os.mkfifo(target)
        shutil.copymode(source, target)
        return
    if info.st_blocks * _STAT_BLOCK_BYTES >= info.st_size:
        shutil.copy2(source, target)
        return
    command = ["cp", "--archive", "--sparse=always", "--no-target-directory", "--", source, target]
    done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    if done.returncode != 0:
        raise OSError(done.stderr.strip()[-300:] or f"cp: exit code {done.returncode}")


def _replace_by_copy(path: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    os.close(descriptor)
    try:
        copy_file(path, temporary)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def give_back(root: Path, owner: tuple[int, int] | None) -> None:
    """Return ``root`` to ``owner`` and make its folders readable again, whatever their modes.

    Set-user-id bits and sockets that the jail made go: they would be ours now, or close the tree to the next jail.
    So do folders below ``_MOST_LEVELS`` others or ``_LONGEST_PATH``: whoever removes the tree would fail on them.
    """
    queue = [(str(root), 0)]
    while queue:
        folder, level = queue.pop()
        if level > _MOST_LEVELS or len(os.fsencode(folder)) > _LONGEST_PATH:
            remove_folder(Path(folder))
            continue
        if owner is not None:
            os.chown(folder, *owner, follow_symlinks=False)
        mode = os.lstat(folder).st_mode
        if stat.S_IMODE(mode) & 0o700 != 0o700:
            os.chmod(folder, stat.S_IMODE(mode) | 0o700)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    queue.append((entry.path, level + 1))
                    continue
                mode = entry.stat(follow_symlinks=False).st_mode
                if _door(entry.path, mode):
                    os.unlink(entry.path)
                    continue
                if owner is not None:
                    os.chown(entry.path, *owner, follow_symlinks=False)
                _drop_set_id(entry.path, mode)


def folder_bytes(
    roots: tuple[Path, ...],
    closed: AbstractSet[str] = frozenset(),
    *,
    enough_bytes: float = inf,
    deadline: float = inf,
) -> int:
    """Disk in use below ``roots``; an entry counts for at least one block of 4 KiB.

    Folders in ``closed`` cannot have been written into by the jail, and are not looked into. Above ``enough_bytes``, and
    after ``deadline``, it looks no further and tells what it has.
    """
    total, num_seen = 0, 0
    queue = [str(root) for root in roots]
    retried: set[str] = set()
    while queue:
        path = queue.pop()
        opened = [found] if (found := _opened(path, retried, queue)) else []
        try:
            while opened:
                num_seen += 1
                if total > enough_bytes or (
                    num_seen % _ENTRIES_BETWEEN_CLOCKS == 0 and monotonic() > deadline
                ):
                    return total
                entry = next(opened[-1], None)
                if entry is None:
                    opened.pop().close()
                    continue
                with suppress(FileNotFoundError):
                    info = _info(entry)
                    total += max(info.st_blocks * _STAT_BLOCK_BYTES, _BLOCK_BYTES)
                    if not stat.S_ISDIR(info.st_mode) or entry.path in closed:
                        continue
                    if len(opened) >= _MOST_OPEN_FOLDERS:
                        queue.append(entry.path)
                    elif found := _opened(entry.path, retried, queue):
                        opened.append(found)
        except OSError as error:
            raise UnmeasurableError(f"{path[:200]}: {error.strerror}") from error
        finally:
            for folder in opened:
                folder.close()
    return total


def _info(entry: os.DirEntry[str]) -> os.stat_result:
    """Of an entry; its folder may be one that can be listed and not gone through."""
    try:
        return entry.stat(follow_symlinks=False)
    except PermissionError:
        open_to_owner(os.path.dirname(entry.path))
        return entry.stat(follow_symlinks=False)


def _opened(folder: str, retried: set[str], queue: list[str]) -> _Entries | None:
    """Open a folder at once when it is found: one that keeps moving would be missed later."""
    try:
        return os.scandir(folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None  # went away while we looked
        if error.errno != errno.EACCES or folder in retried:
            raise UnmeasurableError(f"{folder[:200]}: {error.strerror}") from error
    retried.add(folder)
    with suppress(OSError):
        open_to_owner(folder)
    queue.append(folder)
    return None


class FreshFolders:
    """Folders as they are now, each with at most a few folders and links in it (mount points).

    What is in them stays, what comes is removed. Call only while no process of the jail is alive.
    """

    def __init__(self, roots: tuple[Path, ...]) -> None:
        self.roots = roots
        self._marks: dict[str, _Mark] = {}  # a folder comes before what is in it
        self.closed: set[str] = set()
        """Folders that somebody else owns and nobody else may write: nothing can have been changed inside."""
        owner = os.lstat(roots[0]).st_uid
        queue = [str(root) for root in roots]
        while queue:
            path = queue.pop()
            info = os.lstat(path)
            self._marks[path] = _mark_of(path)
            if info.st_uid != owner and not info.st_mode & 0o022:
                self.closed.add(path)
            if stat.S_ISDIR(info.st_mode):
                queue += [entry.path for entry in os.scandir(path)]

    def clear(self) -> bool:
        """Remove what was not there; False when something that was there is changed, gone or another one.

        Runs after every command: an entry costs a few microseconds.
        """
        for path, mark in self._marks.items():
            if _mark_of(path) != mark:
                return False
            if path in self.closed or os.path.islink(path) or not os.path.isdir(path):
                continue
            for name in os.listdir(path):
                if (new := f"{path}/{name}") not in self._marks:
                    remove(Path(new))
        return True


def size_for(memory_bytes: int, disk_bytes: int) -> int:
    """How large a ``/dev/shm`` in memory is, in bytes: what lies there counts for both limits."""
    return max(_SMALLEST_BYTES, min(memory_bytes, disk_bytes))


class MemoryFolder:
    """The ``/dev/shm`` of a jail where it is a memory of its own, seen from outside, as it is before the first command.

    What is in it the kernel tells to the byte, whether it has a name, is open or only mapped, and it lets nobody write
    more than its size. So locks of ``multiprocessing``, which are deleted and mapped, cost what they take. A command may
    end its jail, and this folder with it: then it holds nothing and is not what it was. Its descriptor is closed by ``close``.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self.device = os.fstat(descriptor).st_dev
        self._before = _mark(descriptor)

    def used_bytes(self) -> int:
        """What is in it, deleted files too; 0 once it is closed."""
        if self._descriptor is None:
            return 0
        info = os.fstatvfs(self._descriptor)
        return (info.f_blocks - info.f_bfree) * info.f_frsize

    def is_untouched(self) -> bool:
        """Whether it is empty and else what it was; never once it is closed. Call while nothing runs."""
        if self._descriptor is None:
            return False
        return not os.listdir(self._descriptor) and _mark(self._descriptor) == self._before

    def close(self) -> None:
        """Let it go with the jail; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _mark_of(path: str) -> _Mark:
    """Of a folder, a link, or a file that is a mount point."""
    if os.path.islink(path):
        info = os.lstat(path)
        return info.st_dev, info.st_ino
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _mark(descriptor)
    finally:
        os.close(descriptor)


def _mark(folder: int) -> _Mark:
    """What an open folder is besides what lies in it: identity, owner, mode, attributes (access lists too) and inode flags."""
    info = os.fstat(folder)
    attributes: list[tuple[str, bytes]] = []
    flags = 0
    with suppress(OSError):  # a file system without them
        attributes = [(name, os.getxattr(folder, name)) for name in sorted(os.listxattr(folder))]
    with suppress(OSError):
        words = fcntl.ioctl(folder, _GET_FLAGS, b"\0" * _FLAG_BYTES)
        flags = int.from_bytes(words[:4], "little") & ~_KEPT_BY_THE_SYSTEM
    return info.st_dev, info.st_ino, info.st_uid, info.st_gid, info.st_mode, tuple(attributes), flags
