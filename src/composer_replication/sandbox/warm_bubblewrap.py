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

from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.bubblewrap import Bubblewrap, BubblewrapSandbox
from composer_replication.sandbox.fresh_folders import FreshFolders
from composer_replication.sandbox.host_paths import base_python
from composer_replication.sandbox.jailed_tree import as_record
from composer_replication.sandbox.memory_folder import MemoryFolder
from composer_replication.sandbox.supervised_run import Verdict, supervise
from composer_replication.sandbox.syscall_filter import filter_program
from composer_replication.sandbox.warm_jail import WarmCommand, WarmJail, settings_of

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
        self._memory: MemoryFolder | None = None
        self._life = ExitStack()
        super().__init__(spec)

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
        except BaseException:
            self._end_jail()
            raise

    def _end_jail(self) -> None:
        """Kill it and take its own folders away; the next command gets a new one."""
        if os.getpid() != self._owner:
            return
        jail, self._jail, self._memory = self._jail, None, None
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

    def close(self) -> None:
        """End the jail, give the tree back, remove the scratch folder and the snapshots; idempotent."""
        self._jailed.close(self._end_jail)
