"""Jails made by ``bwrap`` that stay: one process inside takes orders, so that a command costs a message.

The walls are those of ``bubblewrap``; they are built once. What is new for each command in a
cold jail is made as new here: no process lives on, ``/tmp`` and ``/dev/shm`` are emptied, the
streams, the session and the variables are its own. A command that ends the jail or changes a
mount point of it gets its result, and the next one gets a new jail.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.bubblewrap import Bubblewrap, BubblewrapSandbox
from composer_replication.sandbox.fresh_folders import FolderMark, FreshFolders, empty, traces_of
from composer_replication.sandbox.host_paths import base_python
from composer_replication.sandbox.jailed_tree import as_record, failure
from composer_replication.sandbox.memory_folder import PLACE, MemoryFolder
from composer_replication.sandbox.private_folders import UnmeasurableError, folder_bytes, hand_over
from composer_replication.sandbox.supervised_run import Verdict, supervise
from composer_replication.sandbox.survivors import JailMark, settings_of, settled
from composer_replication.sandbox.syscall_filter import filter_program
from composer_replication.sandbox.tree_snapshots import copy_folder
from composer_replication.sandbox.warm_jail import WarmCommand, WarmJail

_TOOK_THE_JAIL = "it ended the process that keeps the jail"


class WarmBubblewrap(Bubblewrap):
    """The backend ``bubblewrap-warm``."""

    name = "bubblewrap-warm"

    def is_available(self) -> Check:
        """As ``bubblewrap``, on a machine whose system calls the filter knows."""
        check = super().is_available()
        if check.ok and not filter_program():
            detail = f"message queues and kernel keys cannot be refused on {os.uname().machine}."
            return Check(self.name, False, detail, "use --backend bubblewrap")
        return Check(self.name, check.ok, check.detail, check.fix)

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Take over ``spec.tree``; the jail starts with the first command.

        Raises:
            MissingError: ``bwrap`` or ``setpriv`` is not installed (CR0301).
            SandboxFailure: a path of the spec is missing or cannot be shown (CR0304).
        """
        self.require_programs()
        return WarmBubblewrapSandbox(spec)


class WarmBubblewrapSandbox(BubblewrapSandbox):
    """One jail that stays. ``exec`` may be called from several threads at once.

    While it runs a command, further ones get a jail of their own, as cold ones do; so does
    every command in a forked child of the process that opened the sandbox.
    """

    def __init__(self, spec: SandboxSpec) -> None:
        self._owner = os.getpid()
        self._slot = threading.Lock()
        self._jail: WarmJail | None = None
        self._mark: JailMark | None = None
        self._memory: MemoryFolder | None = None
        self._life = ExitStack()
        super().__init__(spec)
        self._folder_marks = {folder: FolderMark.of(folder) for folder in self._jailed.writable}
        self._folder_traces = {folder: traces_of(folder) for folder in self._jailed.writable}

    def prepare(self) -> None:
        """Start the jail now and not with the first command.

        Raises:
            SandboxFailure: it does not start (CR0302), or the sandbox is closed (CR0303).
        """
        with self._jailed.running(), self._slot:
            self._jailed.open_folders()
            self._prepare()

    def _prepare(self) -> None:
        try:
            self._ready_jail()
        except OSError as error:
            why = f"a warm jail cannot be prepared: {error.strerror or error}."
            raise failure("CR0302", why, str(error.filename or self.tree)) from error

    @property
    def jail_pid(self) -> int | None:
        """The first process of the jail as seen from outside; None while there is none."""
        return None if self._jail is None else self._jail.pid

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        if os.getpid() != self._owner or not self._slot.acquire(blocking=False):
            return super()._run(argv, environment, stdin, timeout_seconds)
        try:
            jail, fresh = self._ready_jail()
            try:
                command = jail.start(argv, environment, with_stdin=bool(stdin))
                return self._supervised(jail, command, fresh, stdin, timeout_seconds)
            finally:
                self._sweep(fresh)
        finally:
            self._slot.release()

    def _supervised(
        self, jail: WarmJail, command: WarmCommand, fresh: FreshFolders, stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        try:
            ended = supervise(
                command,
                command.finish,
                stdin=stdin,
                timeout_seconds=timeout_seconds,
                watched=self._jailed.watched(*fresh.roots, closed=fresh.closed, memory=self._memory),
                end_descriptor=jail.descriptor,
            )
        finally:
            command.discard()
        stopped, stderr = "", ended.stderr
        if ended.verdict is Verdict.ENDED:
            stopped = _TOOK_THE_JAIL if command.took_the_jail else ""
            stderr += f"{command.refusal}\n".encode() if command.refusal else b""
        return as_record(ended, stderr, self._jailed.limits, stopped=stopped)

    def _ready_jail(self) -> tuple[WarmJail, FreshFolders]:
        if self._jail is not None and not self._jail.is_alive():
            self._end_jail()
        if self._jail is None:
            self._start_jail()
        assert self._jail is not None
        return self._jail, self._fresh

    def _start_jail(self) -> None:
        try:
            fresh = self._life.enter_context(self._jailed.scratch.for_one_command(self._uid))
            walls = self._walls({"LANG": "C.UTF-8"}, fresh, queues="/dev/mqueue")
            tree = self._jailed.real_tree
            self._jail = WarmJail(walls, tree, base_python(), self._uid, self._limits())
            self._fresh = FreshFolders(tuple(sorted(fresh.iterdir())))
            self._memory = self._jail.memory_folder() if self._uid is None else None
            self._settings = settings_of(self._jail.pid, limits=self._uid is None)
            self._mark = JailMark.of(self._jail)
        except BaseException:
            self._end_jail()
            raise

    def _end_jail(self) -> None:
        """Kill it and take its own folders away; the next command gets a new one."""
        if os.getpid() != self._owner:
            return
        jail, self._jail, self._mark, self._memory = self._jail, None, None, None
        try:
            if jail is not None:
                jail.close()
        finally:
            self._life.close()

    def _sweep(self, fresh: FreshFolders) -> None:
        """Give the next command an empty ``/tmp`` and ``/dev/shm``, or else a new jail."""
        jail = self._jail
        try:
            is_whole = jail is not None and not jail.is_broken and fresh.clear()
            is_whole = is_whole and (self._memory is None or self._memory.is_untouched())
            if is_whole and jail is not None:
                is_whole = settings_of(jail.pid, limits=self._uid is None) == self._settings
        except OSError:
            is_whole = False
        if not is_whole:
            self._end_jail()

    def _limits(self) -> list[tuple[int, int]]:
        """As for a command; the first process, too, counts as one of the user inside."""
        more = 0 if self._uid is None else 1
        return [
            (kind, value + more if kind == resource.RLIMIT_NPROC else value)
            for kind, value in super()._limits()
        ]

    def fill(self, source: Path | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Put files into the tree: a copy of a folder, then single files by their path in the tree.

        What is there now is free of charge for the disk limit, as at the opening.

        Raises:
            SandboxFailure: it cannot be copied (CR0304), or the sandbox is closed (CR0303).
            SandboxFileError: a path of ``files`` leads out of the tree (CR0309).
        """
        with self._jailed.alone():
            try:
                if source is not None:
                    copy_folder(source, self._jailed.real_tree)
                    hand_over(self._jailed.real_tree, self._uid)
                for name, data in (files or {}).items():
                    self._tree_files.write(name, data, is_executable=False)
                self._jailed.baseline_bytes = folder_bytes(self._jailed.writable)
            except (OSError, UnmeasurableError) as error:
                raise failure("CR0304", f"the tree cannot be filled: {error}.", str(source)) from error

    def reset(self) -> None:
        """Make the jail as it was before its first command: no file, no process, no mark of one.

        Empties the tree, ``HOME`` and ``TMPDIR`` (snapshots go too) and then looks: files, modes,
        attributes and flags of these folders, processes, shared memory, message queues, sockets,
        descriptors, variables, limits and priority. Where only the network still tells of its use
        (closed TCP connections, counters of the loopback device), or a folder does by its size or its generation, a new
        jail is started instead; such a folder is made anew.

        Raises:
            SandboxFailure: something survived, named in the message, and the jail is ended (CR0310);
                closed (CR0303).
        """
        with self._jailed.alone(), self._slot:
            try:
                left = self._empty_folders()
            except (OSError, UnmeasurableError) as error:
                left = [f"something that cannot be removed ({error})"]
            if self._jail is not None and not left:
                left = self._look()
            if left:
                self._end_jail()
                raise failure("CR0310", f"something survived the reset of a sandbox: {'; '.join(left[:5])}.")
            self._prepare()

    def _empty_folders(self) -> list[str]:
        """Empty them, and name what is still there or not as it was."""
        self._snapshots.forget()
        left = []
        for folder, mark in self._folder_marks.items():
            mark.put_back(folder)
            empty(folder)
            mark.put_back(folder)
            left += [f"the file {path}" for path in sorted(folder.iterdir())]
            left += [] if FolderMark.of(folder) == mark else [f"the mode or attributes of {folder}"]
        if self._jail is not None:
            self._fresh.clear(thorough=True)
            left += self._fresh.strangers()
            if self._memory is not None:
                self._memory.forget_times()
                left += [] if self._memory.is_untouched() else [f"something in {PLACE}"]
        if not left:
            self._renew_grown_folders()
        self._jailed.baseline_bytes = folder_bytes(self._jailed.writable)
        return left

    def _renew_grown_folders(self) -> None:
        """Put new folders in the place of those that tell of what was in them; the jail that shows them ends.

        Raises:
            OSError: a folder is not ours to take away.
        """
        grown = [
            folder
            for folder, (size, generation) in self._folder_traces.items()
            if (now := traces_of(folder))[0] > size or now[1] != generation
        ]
        if grown or (self._jail is not None and self._fresh.has_traces()):
            self._end_jail()
        for folder in grown:
            self._folder_marks[folder] = self._folder_marks[folder].renewed(folder)
            self._folder_traces[folder] = traces_of(folder)

    def _look(self) -> list[str]:
        assert self._jail is not None and self._mark is not None
        if not self._jail.is_alive():
            self._end_jail()
            return []
        now, left = settled(self._jail, self._mark)
        if not left and now.has_traces(self._mark):
            self._end_jail()
        return left

    def close(self) -> None:
        """End the jail, give the tree back, remove the scratch folder and the snapshots; idempotent."""
        self._jailed.close(self._end_jail)
