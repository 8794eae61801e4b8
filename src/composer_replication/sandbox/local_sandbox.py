"""What every jail on this machine's own file system shares: its folders, environment, files, snapshots and end."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from composer_replication.records import ExecResult, FileEntry, SandboxSpec
from composer_replication.sandbox.calls import are_too_long, check_limits, checked_call, failure
from composer_replication.sandbox.folders import LOOK, open_to_owner
from composer_replication.sandbox.host_paths import base_interpreter, is_below
from composer_replication.sandbox.private_folders import (
    ENOUGH_BYTES,
    Scratch,
    UnmeasurableError,
    folder_bytes,
    give_back,
    hand_over,
    require_room,
    way_out,
)
from composer_replication.sandbox.privileges import release_uid
from composer_replication.sandbox.tree_files import TreeFiles, TreeSnapshots

_NOT_STARTED = 126


class LocalSandbox(ABC):
    """A jail whose tree is a folder of this machine; a backend adds ``_run``.

    The tree is handed over to ``uid``, the user id inside (None: our own), and given back on ``close``.
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
                hand_over(folder, uid)
            self._baseline_bytes = folder_bytes(self._writable)
        except (OSError, UnmeasurableError) as error:
            self._end()
            raise failure("CR0304", f"the tree cannot be handed over: {error}.", str(spec.tree)) from error
        except BaseException:
            self._end()
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
            if found := way_out(path):
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
        """Run one command; see ``interfaces.Sandbox``."""
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
                    open_to_owner(folder, LOOK)
            try:
                require_room(self._writable, min(self._limits.disk_bytes, ENOUGH_BYTES))
                return self._run(argv, environment, data, float(timeout_seconds))
            except OSError as error:  # no space, no descriptor, no process: never the command's doing
                why = f"the command cannot be run: {error.strerror or error}."
                raise failure("CR0302", why, str(error.filename or self.tree)) from error
            except RecursionError as error:
                raise failure("CR0302", "the tree is too deep to be sent.", str(self.tree)) from error

    @abstractmethod
    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        """Run a checked command in the tree."""

    def read_file(self, path: str, *, max_bytes: int = 4 * 1024**2) -> bytes:
        """The first ``max_bytes`` bytes of a file."""
        with self._running():
            return self._tree_files.read(path, max_bytes)

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        """Put a file there, whole or not at all; missing folders are made."""
        with self._running():
            self._is_dirty = True
            self._tree_files.write(path, data, is_executable=is_executable)

    def list_files(self, path: str = ".") -> list[FileEntry]:
        """Everything below a folder, sorted by path."""
        with self._running():
            return self._tree_files.list(path)

    def snapshot(self) -> str:
        """Keep the tree as it is; the name to ``restore`` it by."""
        with self._running(alone=True):
            try:
                return self._snapshots.take()
            except OSError as error:
                raise failure("CR0309", f"the tree cannot be kept: {error}.", str(self.tree)) from error

    def restore(self, snapshot: str) -> None:
        """Bring the tree back to a snapshot."""
        with self._running(alone=True):
            if snapshot not in self._snapshots:
                raise failure("CR0309", f"there is no snapshot {snapshot!r} of this tree.", str(self.tree))
            self._is_dirty = True
            try:
                self._snapshots.restore(snapshot)
            except OSError as error:
                raise failure("CR0309", f"the tree is not whole: {error}.", str(self.tree)) from error

    def close(self) -> None:
        """Give the tree back, remove the scratch folder and the snapshots; idempotent."""
        self._end()

    def _end(self, end_jail: Callable[[], None] | None = None) -> None:
        """As ``close``; ``end_jail`` is called when no command runs any more, before anything is taken away."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lock.wait_for(lambda: self._num_running == 0)
        if end_jail is not None:
            end_jail()
        if self._real_tree.is_dir():
            with suppress(OSError):  # a tree that its owner removed meanwhile
                give_back(self._real_tree, self._owner)
        self._scratch.remove()
        release_uid(self._uid)

    def __enter__(self) -> Self:
        return self

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
