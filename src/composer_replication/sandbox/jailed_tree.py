"""What every backend does around a jail: files, environment, and the result record."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path

from composer_replication.errors import SandboxFailure
from composer_replication.records import ExecResult, Limits, SandboxSpec
from composer_replication.sandbox.call_checks import check_limits
from composer_replication.sandbox.closed_folders import LOOK, open_to_owner
from composer_replication.sandbox.host_disk import ENOUGH_BYTES, LEAST_BYTES, require_room
from composer_replication.sandbox.host_paths import base_interpreter, is_below
from composer_replication.sandbox.memory_folder import MemoryFolder
from composer_replication.sandbox.private_folders import (
    Scratch,
    UnmeasurableError,
    folder_bytes,
    give_back,
    hand_over,
    way_out,
)
from composer_replication.sandbox.privileges import check_own_limits
from composer_replication.sandbox.supervised_run import Ended, Verdict, Watched
from composer_replication.sandbox.user_ids import release_uid

# The marker tells the command's own exit from a failure of what leads to it.
STARTER = 'printf %s "$1" >&2; shift; exec "$@"'

# This one waits, too, for a line on its input: without the process that would write it nothing is started.
HELD_STARTER = 'printf %s "$1" >&2; shift; read -r _ || exit 125; exec "$@"'


def failure(code: str, message: str, where: str = "") -> SandboxFailure:
    """A failure of the jail, whose next step is always the self-test."""
    return SandboxFailure(code, message, where=where, fix="composer-rl sandbox selftest")


class JailedTree:
    """The tree, the scratch folder and the count of running commands of one sandbox.

    Args:
        spec: its ``tree`` is handed over to ``uid`` and given back on ``close``.
        uid: the user id inside, or None when it is our own.

    Raises:
        SandboxFailure: a path of the spec is missing or cannot be shown, or the tree holds a device or
            a socket (CR0304); there is no space for our own folder (CR0302).
            or this process may not give it so much itself (CR0302).
        UsageError: a limit that cannot be held (CR0886).
    """

    def __init__(self, spec: SandboxSpec, uid: int | None) -> None:
        check_limits(spec.limits)
        check_own_limits(spec.limits)
        self.limits: Limits = spec.limits
        self.real_tree = spec.tree.resolve()
        self._check_paths(spec, uid)
        self._uid = uid
        self._lock = threading.Condition()
        self._num_running = 0
        self._is_held = False
        self._is_closed = False
        info = self.real_tree.stat()
        self._owner = None if uid is None else (info.st_uid, info.st_gid)
        try:
            self.scratch = Scratch()
        except OSError as error:
            why = f"no folder for a jail can be made: {error.strerror or error}."
            raise failure("CR0302", why, str(error.filename or "")) from error
        try:
            for folder in (self.real_tree, *self.scratch.writable):
                hand_over(folder, uid)
            self.writable = (self.real_tree, *self.scratch.writable)
            self.baseline_bytes = folder_bytes(self.writable)
        except (OSError, UnmeasurableError) as error:
            self.close()
            raise failure("CR0304", f"the tree cannot be handed over: {error}.", str(spec.tree)) from error
        except BaseException:
            self.close()
            raise

    def _check_paths(self, spec: SandboxSpec, uid: int | None) -> None:
        if not self.real_tree.is_dir():
            raise failure("CR0304", "the tree of a sandbox is not a folder.", str(spec.tree))
        for path in (*spec.read_only, *spec.masked):
            if is_below(path.resolve(), [self.real_tree]):
                raise failure(
                    "CR0304",
                    "a read-only or masked path lies in the tree, where everything can be changed.",
                    str(path),
                )
        for path in spec.read_only:
            if not path.exists():
                raise failure("CR0304", "a read-only path of a sandbox is missing.", str(path))
            info = path.stat()
            if uid not in (None, info.st_uid) and not info.st_mode & 0o004:
                raise failure(
                    "CR0304",
                    "a read-only path is closed to other users, and the jail of root runs as one; "
                    "chmod -R go+rX opens it.",
                    str(path),
                )
            if found := way_out(path):
                raise failure(
                    "CR0304",
                    "a read-only path holds a socket or named pipe, through which the jail could reach a process "
                    "outside.",
                    found,
                )

    def watched(
        self,
        *more: Path,
        num_own_processes: int = 0,
        closed: AbstractSet[str] = frozenset(),
        memory: MemoryFolder | None = None,
    ) -> Watched:
        """What one command may use; ``more`` and ``memory`` are folders of this command alone, empty at its start."""
        folders = (*self.writable, *more)
        return Watched(self.limits, folders, self.baseline_bytes, num_own_processes, closed, memory)

    def require_room(self) -> None:
        """Can everything be written that a command still may write?

        Raises:
            SandboxFailure: the machine's disk has no room for that (CR0104).
        """
        try:
            require_room(self.writable, min(self.limits.disk_bytes, ENOUGH_BYTES))
        except SandboxFailure:
            with suppress(UnmeasurableError):  # measured only where it matters
                used = folder_bytes(self.writable) - self.baseline_bytes
                require_room(
                    self.writable, min(max(self.limits.disk_bytes - used, LEAST_BYTES), ENOUGH_BYTES)
                )
                return
            raise

    def open_folders(self) -> None:
        """Open tree, ``HOME`` and ``TMPDIR`` to the user inside: closed by a command they would keep the next one out.

        Only where a right to look into one is missing: a tree that may not be written stays so.
        """
        for folder in self.writable:
            with suppress(OSError):  # without a jail a command may take them away
                open_to_owner(folder, LOOK)

    def write_accounts(self, uid: int, gid: int) -> None:
        """Write the few account files that a jail sees instead of the host's."""
        for name, text in account_files(uid, gid, self.scratch.home).items():
            self.scratch.write(name, text)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a command that is given ``variables``."""
        return {
            "PATH": os.pathsep.join((*_interpreter_bin(), "/usr/local/bin", "/usr/bin", "/bin")),
            "HOME": str(self.scratch.home),
            "TMPDIR": str(self.scratch.tmp),
            "LANG": "C.UTF-8",
            "USER": "sandbox",
            "LOGNAME": "sandbox",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            **variables,
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a running command, so that ``close`` waits for it.

        Raises:
            SandboxFailure: the sandbox is closed (CR0303).
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._is_held)
            self._check_open()
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                self._lock.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nothing runs, and let nothing begin meanwhile.

        Raises:
            SandboxFailure: the sandbox is closed (CR0303).
        """
        with self._lock:
            self._lock.wait_for(lambda: self._num_running == 0 and not self._is_held)
            self._check_open()
            self._is_held = True
        try:
            yield
        finally:
            with self._lock:
                self._is_held = False
                self._lock.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise failure("CR0303", "the sandbox is closed.", str(self.real_tree))

    def close(self, end_jail: Callable[[], None] | None = None) -> None:
        """Wait for running commands, give the tree back, remove the scratch folder; idempotent.

        Args:
            end_jail: called when no command runs any more, before anything is taken away.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._lock.wait_for(lambda: self._num_running == 0 and not self._is_held)
        if end_jail is not None:
            end_jail()
        if self.real_tree.is_dir():
            with suppress(OSError):  # a tree that its owner removed meanwhile
                give_back(self.real_tree, self._owner)
        self.scratch.remove()
        release_uid(self._uid)


def account_files(uid: int, gid: int, home: Path) -> dict[str, str]:
    """By name, the files of ``/etc`` that tell of users and hosts."""
    nobody = "" if uid == 65534 else "nobody:x:65534:65534::/nonexistent:/bin/false\n"
    return {
        "passwd": f"sandbox:x:{uid}:{gid}::{home}:/bin/sh\n{nobody}",
        "group": f"sandbox:x:{gid}:\n" + ("" if gid == 65534 else "nogroup:x:65534:\n"),
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }


def _interpreter_bin() -> list[str]:
    return [str(path) for path in base_interpreter().read_only if path.name == "bin"]


def to_result(ended: Ended, marker: bytes, limits: Limits, *, backend: str) -> ExecResult:
    """Turn the end of a run into the record, without our marker in front of its errors.

    Raises:
        SandboxFailure: no marker, so the command was never started (CR0302).
    """
    before, found, stderr = ended.stderr.partition(marker)
    if not found and ended.verdict is Verdict.ENDED:
        # The last line alone: before it may stand where in our code it happened.
        said = (before.decode(errors="replace").strip() or f"exit code {ended.exit_code}").splitlines()[-1]
        raise failure("CR0302", f"{backend} did not start the command: {said[-500:]}.")
    return as_record(ended, stderr, limits)


def as_record(ended: Ended, stderr: bytes, limits: Limits, *, stopped: str = "") -> ExecResult:
    """The record of a run; ``stopped`` is said in its last line when no limit is named there."""
    stdout = ended.stdout[: limits.output_bytes]
    truncated = ended.truncated or len(stdout) < len(ended.stdout) or len(stderr) > limits.output_bytes
    text = stderr[: limits.output_bytes].decode(errors="replace")
    if ended.verdict not in (Verdict.ENDED, Verdict.TIMED_OUT):
        stopped = ended.verdict.value
    if stopped:
        text = f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}[sandbox] stopped: {stopped}\n"
    return ExecResult(
        exit_code=ended.exit_code,
        stdout=stdout.decode(errors="replace"),
        stderr=text,
        truncated=truncated,
        timed_out=ended.verdict is Verdict.TIMED_OUT,
        out_of_memory=ended.verdict is Verdict.OVER_MEMORY,
        seconds=ended.seconds,
        stopped=stopped,
    )
