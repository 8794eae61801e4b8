"""What every jail on this machine's own file system shares: its folders, environment, files, snapshots and end.

Files of a tree are read, written and listed from outside while hostile code has them in its hands. Every component of a
path is opened by itself, relative to the folder before it and without following links; a link is resolved by us and must
stay in the tree. So a folder that the jail swaps for a link while we look leads nowhere. Of a path only the folder that
was reached is held open: a path may have more folders than we may have descriptors.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from composer_replication.errors import SandboxFailure, SandboxFileError
from composer_replication.records import ExecResult, FileEntry, SandboxSpec
from composer_replication.sandbox import folders
from composer_replication.sandbox.calls import are_too_long, check_limits, checked_call, failure
from composer_replication.sandbox.host_paths import base_interpreter, is_below
from composer_replication.sandbox.privileges import release_uid
from composer_replication.sandbox.process_folder import Scratch

_NOT_STARTED = 126
_MAX_LINKS = 40
_OUR_OWN_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # no file brings these about
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
_COPY = ["cp", "--archive", "--reflink=auto", "--no-target-directory", "--"]
_LONGEST_PATH = 4095  # what the system takes, without the NUL at its end
_READ = 0o400


class LocalSandbox(AbstractContextManager["LocalSandbox"]):
    """One jail around one task tree, a folder of this machine; used by any number of threads. A backend adds ``_run``.

    docs/sandbox.md has the contract in full. Paths are POSIX and relative to the tree, or absolute below it; links are followed
    inside of it. ``list_files`` gives all below a folder, sorted; ``restore`` brings a ``snapshot`` back any number of times. Of
    an ``exec`` nothing is left alive when it returns. The tree is handed over to ``uid``, the user id inside (None: our own).

    A ``SandboxFailure`` is raised where the jail broke (CR0302), is closed (CR0303), or knows no such snapshot (CR0309), never for
    what a command did; a ``SandboxFileError`` for a path that cannot be used (CR0309), a ``CommandError`` for what is no command.
    """

    _is_dirty = True
    """Whether the tree was changed by us since the last command: for who runs commands in a copy of it."""
    _runs_alone = False
    """Whether there is one call at a time."""

    def __init__(self, spec: SandboxSpec, uid: int | None) -> None:
        check_limits(spec.limits)
        self.tree = spec.tree
        self._limits = spec.limits
        self._real_tree = spec.tree.resolve()
        self._uid = uid
        for problem, path in self._problems(spec):
            raise failure("CR0304", problem, str(path))
        self._lock = threading.Condition()
        self._num_running = 0
        self._is_held = False
        self._is_closed = False
        info = self._real_tree.stat()
        self._owner = None if uid is None else (info.st_uid, info.st_gid)
        try:
            self._scratch = Scratch()
        except OSError as error:
            why = f"no folder for a jail can be made: {error.strerror or error}."
            raise failure("CR0302", why, str(error.filename or "")) from error
        self._writable = (self._real_tree, *self._scratch.writable)
        try:
            for folder in self._writable:
                folders.hand_over(folder, uid)
            self._baseline_bytes = folders.folder_bytes(self._writable)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | folders.UnmeasurableError):
                why = f"the tree cannot be handed over: {error}."
                raise failure("CR0304", why, str(spec.tree)) from error
            raise
        self._tree_files = TreeFiles(self._real_tree, uid)
        self._snapshots = TreeSnapshots(self._real_tree, self._scratch.root / "snapshots")

    def _problems(self, spec: SandboxSpec) -> Iterator[tuple[str, Path | str]]:
        """Why these paths cannot be shown, and which."""
        if not self._real_tree.is_dir():
            yield "the tree of a sandbox is not a folder.", spec.tree
        for path in (*spec.read_only, *spec.masked):
            if is_below(path.resolve(), [self._real_tree]):
                yield "a read-only or masked path lies in the tree, where everything can be changed.", path
        for path in spec.read_only:
            if not path.exists():
                yield "a read-only path of a sandbox is missing.", path
            info = path.stat()
            if self._uid not in (None, info.st_uid) and not info.st_mode & 0o004:
                why = "a read-only path is closed to other users, and the jail of root runs as one; chmod -R go+rX opens it."
                yield why, path
            if found := folders.way_out(path):
                why = "a read-only path holds a socket or named pipe, through which the jail could reach a process outside."
                yield why, found

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        timeout_seconds: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        argv, data, variables = checked_call(command, timeout_seconds, stdin, env)
        environment = self._variables(variables)
        with self._running():
            if are_too_long(argv, environment):
                stderr = f"{argv[0]}: Argument list too long\n"
                return ExecResult(_NOT_STARTED, "", stderr, False, False, False, 0.0)
            if not self._real_tree.is_dir():
                raise failure("CR0302", "the tree of the sandbox is gone.", str(self.tree))
            for folder in self._writable:  # closed by a command they would keep the next one out
                with suppress(OSError):  # without a jail a command may take them away
                    folders.open_to_owner(folder, folders.LOOK)
            try:
                folders.require_room(self._writable, min(self._limits.disk_bytes, folders.ENOUGH_BYTES))
                return self._run(argv, environment, data, float(timeout_seconds))
            except OSError as error:  # no space, no descriptor, no process: never the command's doing
                why = f"the command cannot be run: {error.strerror or error}."
                raise failure("CR0302", why, str(error.filename or self.tree)) from error

    @abstractmethod
    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        """Run a checked command in the tree."""

    def read_file(self, path: str, *, max_bytes: int = 4 * 1024**2) -> bytes:
        with self._running():
            return self._tree_files.read(path, max_bytes)

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        with self._running():
            self._is_dirty = True
            self._tree_files.write(path, data, is_executable=is_executable)

    def list_files(self, path: str = ".") -> list[FileEntry]:
        with self._running():
            return self._tree_files.list(path)

    def snapshot(self) -> str:
        with self._running(alone=True):
            try:
                return self._snapshots.take()
            except OSError as error:
                raise failure("CR0309", f"the tree cannot be kept: {error}.", str(self.tree)) from error

    def restore(self, snapshot: str) -> None:
        with self._running(alone=True):
            if snapshot not in self._snapshots.names:
                raise failure("CR0309", f"there is no snapshot {snapshot!r} of this tree.", str(self.tree))
            self._is_dirty = True
            try:
                self._snapshots.restore(snapshot)
            except OSError as error:
                raise failure("CR0309", f"the tree is not whole: {error}.", str(self.tree)) from error

    def close(self) -> None:
        """End the jail, give the tree back, remove the scratch folder and the snapshots; idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lock.wait_for(lambda: self._num_running == 0)
        self._end_jail()
        if self._real_tree.is_dir():
            with suppress(OSError):  # a tree that its owner removed meanwhile
                folders.give_back(self._real_tree, self._owner)
        self._scratch.remove()
        release_uid(self._uid)

    def _end_jail(self) -> None:  # most have none between two commands
        """End what stays between two commands; called when none runs any more, before anything is taken away."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def _variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a command that is given ``variables``."""
        own = [str(path) for path in base_interpreter().read_only if path.name == "bin"]
        return {
            "PATH": os.pathsep.join((*own, "/usr/local/bin", "/usr/bin", "/bin")),
            "HOME": str(self._scratch.home),
            "TMPDIR": str(self._scratch.tmp),
            "LANG": "C.UTF-8",
            "USER": "sandbox",
            "LOGNAME": "sandbox",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            **variables,
        }

    @contextmanager
    def _running(self, *, alone: bool = False) -> Iterator[None]:
        """Have ``close`` wait for us; ``alone`` waits until nothing runs, and lets nothing begin meanwhile."""
        alone = alone or self._runs_alone
        with self._lock:
            self._lock.wait_for(lambda: not self._is_held and not (alone and self._num_running))
            if self._is_closed:
                raise failure("CR0303", "the sandbox is closed.", str(self._real_tree))
            self._num_running += 1
            self._is_held = alone
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                self._is_held = False
                self._lock.notify_all()


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
            start = folders.open_folder(name, folder)
        found: list[FileEntry] = []
        try:
            for place, info in folders.walk(start, "" if above == "." else above + "/"):
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
        folder = folders.hold_folder(self._root)
        try:
            for name in names:
                there = folders.hold_folder(name, folder)
                os.close(folder)
                folder = there
        except OSError:
            os.close(folder)
            raise
        return folder

    def _folder(self, name: str, above: int, *, makes_folders: bool) -> int:
        try:
            return folders.hold_folder(name, above)
        except FileNotFoundError:
            if not makes_folders:
                raise
        os.mkdir(name, 0o755, dir_fd=above)
        if self._uid is not None:
            os.chown(name, self._uid, self._uid, dir_fd=above, follow_symlinks=False)
        return folders.hold_folder(name, above)


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
        self.names: list[str] = []

    def take(self) -> str:
        """Copy the tree; on a file system with copy on write only what changes later costs anything."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"snapshot-{len(self.names)}"
        try:
            _copy_whatever_its_modes(self._tree, self._folder / name)
        except BaseException:
            folders.remove_folder(self._folder / name)
            raise
        self.names.append(name)
        return name

    def restore(self, name: str) -> None:
        """Empty the tree and copy the snapshot back; the folder itself stays, for it may be mounted."""
        folders.open_to_owner(self._tree)
        folders.empty(self._tree)
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
        for path, info in folders.walk(folders.open_folder(root)):
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
    needed = {stat.S_IFDIR: folders.LOOK, stat.S_IFREG: _READ}.get(stat.S_IFMT(info.st_mode), 0)
    return info.st_mode & needed != needed


def _put_back(root: Path, closed: list[tuple[Path, int]]) -> None:
    for path, mode in reversed(closed):  # what is in a folder before the folder
        with suppress(OSError):
            os.chmod(root / path, mode)
