"""Files of a tree that hostile code has in its hands: read, write and list them from outside; copies to come back to.

Every component of a path is opened by itself, relative to the folder before it and without following
links; a link is resolved by us and must stay in the tree. So a folder that the jail swaps for a link
while we look leads nowhere. Of a path only the folder that was reached is held open: a path may have more
folders than we may have descriptors.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from composer_replication.errors import SandboxFailure, SandboxFileError
from composer_replication.records import FileEntry
from composer_replication.sandbox.calls import failure
from composer_replication.sandbox.folders import (
    LOOK,
    empty,
    hold_folder,
    open_folder,
    open_to_owner,
    remove_folder,
    walk,
)

_MAX_LINKS = 40
_OUR_OWN_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # no file brings these about
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
_COPY = ["cp", "--archive", "--reflink=auto", "--no-target-directory", "--"]
_LONGEST_PATH = 4095  # what the system takes, without the NUL at its end
_READ = 0o400


class TreeFiles:
    """The files below ``root``, a resolved path; new ones belong to ``uid`` (None: the user that we are)."""

    def __init__(self, root: Path, uid: int | None) -> None:
        self._root = root
        self._uid = uid

    def read(self, path: str, max_bytes: int) -> bytes:
        """The first ``max_bytes`` bytes of a file."""
        with self._opened(path) as (folder, name):
            # Without O_NONBLOCK a pipe without a writer would hold us for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folder)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise _unusable(path, "it is no file")
                chunks, left = [], max_bytes
                while left > 0 and (chunk := os.read(descriptor, min(left, 1 << 20))):
                    chunks.append(chunk)
                    left -= len(chunk)
                return b"".join(chunks)
            finally:
                os.close(descriptor)

    def write(self, path: str, data: bytes, *, is_executable: bool) -> None:
        """Put a file there, whole or not at all; missing folders are made."""
        temporary = f".{os.getpid()}-{os.urandom(8).hex()}"
        with self._opened(path, makes_folders=True) as (folder, name):
            try:
                descriptor = os.open(
                    temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder
                )
                with os.fdopen(descriptor, "wb") as handle:
                    handle.write(data)
                    os.fchmod(handle.fileno(), 0o755 if is_executable else 0o644)
                    if self._uid is not None:
                        os.fchown(handle.fileno(), self._uid, self._uid)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(OSError):  # it has its own name by now
                    os.unlink(temporary, dir_fd=folder)

    def list(self, path: str) -> list[FileEntry]:
        """Everything below a folder, sorted by path; folders that our own user closed are opened to him."""
        above = self._relative(path)
        with self._opened(path) as (folder, name):
            start = open_folder(name, folder)
        found: list[FileEntry] = []
        try:
            for place, info in walk(start, "" if above == "." else above + "/"):
                kind: Any = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
                found.append(FileEntry(place, kind, info.st_size, stat.S_IMODE(info.st_mode)))
        except OSError as error:
            raise _refusal(os.fsdecode(error.filename or path), error) from error
        return sorted(found, key=lambda entry: entry.path)

    def _relative(self, path: str) -> str:
        """The path as asked, relative to the tree."""
        if "\0" in path:
            raise _unusable(path.replace("\0", "\\0"), "a NUL byte in it")
        try:
            os.fsencode(path)
        except UnicodeEncodeError as error:  # half of a surrogate pair can stand in JSON
            raise _unusable(ascii(path), "it has no bytes") from error
        pure = PurePosixPath(path)
        if not pure.is_absolute():
            return str(pure)
        if not pure.is_relative_to(self._root):
            raise _unusable(path, "it leads out of the tree")
        return str(pure.relative_to(self._root))

    @contextmanager
    def _opened(self, path: str, *, makes_folders: bool = False) -> Iterator[tuple[int, str]]:
        """The folder of a path, opened, and the last name with its links resolved."""
        todo = list(reversed(PurePosixPath(self._relative(path)).parts))
        above: list[str] = []
        num_links = 0
        try:
            folder = self._reached([])
            try:
                while todo:
                    part = todo.pop()
                    if part == "..":
                        if not above:
                            raise _unusable(path, "it leads out of the tree")
                        above.pop()
                        there = self._reached(above)
                    elif (target := _link_target(part, folder)) is not None:
                        num_links += 1
                        if num_links > _MAX_LINKS:
                            raise _unusable(path, "too many links")
                        if target.startswith("/"):
                            target, above = self._relative(target), []
                        todo += reversed(PurePosixPath(target).parts)
                        there = self._reached(above)
                    elif not todo:
                        yield folder, part
                        return
                    else:
                        there = self._folder(part, folder, makes_folders=makes_folders)
                        above.append(part)
                    os.close(folder)
                    folder = there
                yield folder, "."
            finally:
                os.close(folder)
        except OSError as error:
            raise _refusal(path, error) from error

    def _reached(self, names: Iterable[str]) -> int:
        """A folder below the root by the names on the way there: one that the jail moved meanwhile is not found."""
        folder = hold_folder(self._root)
        try:
            for name in names:
                there = hold_folder(name, folder)
                os.close(folder)
                folder = there
        except OSError:
            os.close(folder)
            raise
        return folder

    def _folder(self, name: str, above: int, *, makes_folders: bool) -> int:
        try:
            return hold_folder(name, above)
        except FileNotFoundError:
            if not makes_folders:
                raise
        os.mkdir(name, 0o755, dir_fd=above)
        if self._uid is not None:
            os.chown(name, self._uid, self._uid, dir_fd=above, follow_symlinks=False)
        return hold_folder(name, above)


def _link_target(name: str, folder: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None  # no link, or not there: whoever opens it next says so


def _refusal(path: str, error: OSError) -> SandboxFileError | SandboxFailure:
    """What an error of the system says of a file; that we lack something is no fault of the file."""
    why = error.strerror or str(error)
    if error.errno in _OUR_OWN_FAULT:
        return failure("CR0302", f"a file of the tree cannot be looked at: {why}.", _in_words(path[:300]))
    return _unusable(path, why)


def _unusable(path: str, why: str) -> SandboxFileError:
    return SandboxFileError(
        "CR0309",
        f"the file cannot be used: {why[0].lower()}{why[1:]}.",
        where=_in_words(path[:300]),
        fix="list the tree",
    )


def _in_words(path: str) -> str:
    """A name that hostile code chose, for a sentence that lands on a screen."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "backslashreplace").decode()
        for letter in path
    )


class TreeSnapshots:
    """The snapshots of one tree, as copies in ``folder``. Call only while no process of the jail is alive.

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
            _copy_whatever_its_modes(self._tree, self._folder / name)
        except BaseException:
            remove_folder(self._folder / name)
            raise
        self._names.append(name)
        return name

    def restore(self, name: str) -> None:
        """Empty the tree and copy the snapshot back; the folder itself stays, for it may be mounted."""
        open_to_owner(self._tree)
        empty(self._tree)
        _copy_whatever_its_modes(self._folder / name, self._tree)


def _copy_whatever_its_modes(source: Path, target: Path) -> None:
    """Copy what is in one folder into another; what a command closed to our own user is closed again in both."""
    room = _LONGEST_PATH - max(len(os.fsencode(folder)) for folder in (source, target)) - 1
    closed: list[tuple[Path, int]] = []
    try:
        for path, info in _all_of(source, room):
            if _is_closed(info):
                mode = stat.S_IMODE(info.st_mode)
                closed.append((Path(path), mode))
                if not stat.S_ISDIR(info.st_mode):  # folders are opened by whoever looks into them
                    os.chmod(source / path, mode | _READ)
        command = [*_COPY, str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise OSError(said[:300])
        _put_back(target, closed)
    finally:
        _put_back(source, closed)


def _all_of(root: Path, room: int) -> Iterator[tuple[str, os.stat_result]]:
    """A folder and everything in it, by paths of at most ``room`` bytes."""
    yield ".", os.lstat(root)
    try:
        for path, info in walk(open_folder(root)):
            if len(os.fsencode(path)) > room:
                raise OSError(errno.ENAMETOOLONG, "a path in it is too long")
            yield path, info
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EFBIG):
            raise
        why = f"the tree cannot be kept: {error.strerror}."
        raise SandboxFileError("CR0309", why, where=str(root), fix="list the tree") from error


def _is_closed(info: os.stat_result) -> bool:
    """Whether our own user may not read what is his; as root we read whatever is another one's."""
    if info.st_uid != os.geteuid():
        return False
    needed = {stat.S_IFDIR: LOOK, stat.S_IFREG: _READ}.get(stat.S_IFMT(info.st_mode), 0)
    return info.st_mode & needed != needed


def _put_back(root: Path, closed: list[tuple[Path, int]]) -> None:
    for path, mode in reversed(closed):  # what is in a folder before the folder
        with suppress(OSError):
            os.chmod(root / path, mode)
