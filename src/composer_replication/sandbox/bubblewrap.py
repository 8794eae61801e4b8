"""Jails made by ``bwrap``: own namespaces for files, processes, network, users and IPC.

Two ways to lose privileges, chosen by who we are. As root the jail is set up without a
user namespace and the command runs under a user id of its own, to which the tree is
handed over: the process limit counts nothing for root. As an ordinary user the jail
gets a user namespace in which no further one can be made.

Each command is started stopped (``--block-fd``): its limits are set and a handle on
the first process of its process namespace is taken before it runs. Killing that first
process makes the kernel kill every other one, however it daemonised. The command itself
waits for a word of ours until the jail is bound to our life.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from composer_replication.errors import MissingError
from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.bwrap_program import (
    INSTALL,
    find_bwrap,
    how_to_allow,
    require_bwrap,
    start_problem,
)
from composer_replication.sandbox.held_jail import HeldJail
from composer_replication.sandbox.jailed_tree import HELD_STARTER, failure, to_result
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.memory_folder import size_for
from composer_replication.sandbox.mounts import MountPlan
from composer_replication.sandbox.privileges import drops_uid, setpriv
from composer_replication.sandbox.supervised_run import read_until, supervise
from composer_replication.sandbox.user_ids import release_uid, reserve_uid

_NUM_INIT_PROCESSES = 1


class Bubblewrap:
    """The backend ``bubblewrap``."""

    name = "bubblewrap"

    def is_available(self) -> Check:
        """Can a jail be started here? Starts one that runs ``true``.

        Raises:
            SandboxFailure: the packaged ``bwrap`` is not the one that is recorded (CR0408).
        """
        program = find_bwrap()
        if program is None:
            return Check(self.name, False, "the program bwrap is not installed.", INSTALL)
        if drops_uid() and setpriv() is None:
            return Check(self.name, False, "setpriv is not on PATH.", "install util-linux")
        which = f"{program.path} ({program.origin})"
        if problem := start_problem(program.path):
            fix = how_to_allow(program.path)
            return Check(self.name, False, f"{which} cannot start a jail: {problem}", fix)
        return Check(self.name, True, f"{which} starts a jail.")

    def open(self, spec: SandboxSpec) -> Sandbox:
        """Take over ``spec.tree`` and prepare a jail around it.

        Raises:
            MissingError: ``bwrap`` or ``setpriv`` is not installed (CR0301).
            SandboxFailure: a path of the spec is missing or cannot be shown (CR0304).
        """
        self.require_programs()
        return BubblewrapSandbox(spec)

    def require_programs(self) -> None:
        """Are the programs there?

        Raises:
            MissingError: ``bwrap`` or ``setpriv`` is not installed (CR0301).
        """
        require_bwrap()
        if drops_uid() and setpriv() is None:
            raise MissingError("CR0301", "the program setpriv is not installed.", fix="install util-linux")


class BubblewrapSandbox(LocalSandbox):
    """One jail; ``exec`` may be called from several threads at once."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._uid = reserve_uid() if drops_uid() else None
        try:
            super().__init__(spec, self._uid)
        except BaseException:
            release_uid(self._uid)
            raise
        try:
            uid, gid = (self._uid, self._uid) if self._uid is not None else (os.getuid(), os.getgid())
            self._jailed.write_accounts(uid, gid)
            shared = None
            if self._uid is None:  # to root the kernel tells the size of each file, on disk too
                shared = size_for(spec.limits.memory_bytes, spec.limits.disk_bytes)
            self._mounts = MountPlan(spec, self._jailed.scratch, shared_memory_bytes=shared)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise failure("CR0302", f"a jail cannot be prepared: {error.strerror or error}.") from error
            raise

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        marker = f"<{random.randbytes(16).hex()}>"  # noqa: S311  tells lines apart, guards nothing
        started = time.monotonic()
        with (
            self._jailed.scratch.for_one_command(self._uid) as fresh,
            HeldJail(self._command(argv, environment, marker, fresh, has_stdin=bool(stdin))) as jail,
        ):
            jail.release(self._limits())
            jail.own_pipes(self._uid)
            # By now the jail dies with us. Before, the signal for that is not asked for yet: a jail that
            # we do not live to see must not run the command.
            early = read_until(jail.process.stderr, marker.encode(), started + timeout_seconds)
            is_ready = marker.encode() in early
            memory = jail.memory_folder() if self._uid is None and is_ready else None
            ended = supervise(
                jail.process,
                jail.kill,
                stdin=b"\n" + stdin,
                timeout_seconds=max(0.001, timeout_seconds - (time.monotonic() - started)),
                watched=self._jailed.watched(fresh, num_own_processes=_NUM_INIT_PROCESSES, memory=memory),
                early_stderr=early,
            )
        ended = replace(ended, seconds=time.monotonic() - started)
        return to_result(ended, marker.encode(), self._jailed.limits, backend=Bubblewrap.name)

    def _command(
        self, argv: Sequence[str], env: Mapping[str, str], marker: str, fresh: Path, *, has_stdin: bool
    ) -> list[str]:
        # As in a warm jail: some programs read a pipe in the place of files, although nothing comes.
        start = HELD_STARTER if has_stdin else f"{HELD_STARTER} </dev/null"
        # Before it is the user inside, nobody may be allowed into the tree.
        start = f'cd -- "$1" && unset OLDPWD && shift || exit 125; {start}'
        starter = ["/bin/sh", "-c", start, "sandbox", str(self._jailed.real_tree), marker, *argv]
        # What the command is given must not choose or change what still runs with privileges.
        starter = ["/usr/bin/env", "-i", "--", *(f"{name}={value}" for name, value in env.items()), *starter]
        if self._uid is not None:
            user = str(self._uid)
            drop = [setpriv() or "setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
            starter = [*drop, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", *starter]
        return ["bwrap", "--die-with-parent", *self._walls({}, fresh), "--chdir", "/", "--", *starter]

    def _walls(self, env: Mapping[str, str], fresh: Path, *, queues: str = "") -> list[str]:
        """The namespaces, privileges, files and variables of a jail, as arguments for ``bwrap``."""
        walls = ["--unshare-ipc", "--unshare-pid", "--unshare-net"]
        walls += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
        if self._uid is None:
            walls += ["--unshare-user", "--disable-userns"]
        else:
            walls += ["--cap-drop", "ALL"]  # and of the three the last is for giving up the others for good
            for name in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
                walls += ["--cap-add", name]
        walls += [*self._mounts.arguments(fresh, queues=queues), "--clearenv"]
        for name, value in env.items():
            walls += ["--setenv", name, value]
        return walls

    def _limits(self) -> list[tuple[int, int]]:
        limits = self._jailed.limits
        found = [
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_DATA, limits.memory_bytes),
            (resource.RLIMIT_FSIZE, limits.disk_bytes),
            (resource.RLIMIT_NOFILE, limits.num_open_files),
        ]
        if self._uid is not None:
            found.append((resource.RLIMIT_NPROC, limits.num_processes))
        elif _counts_per_namespace():
            found.append((resource.RLIMIT_NPROC, limits.num_processes + _NUM_INIT_PROCESSES))
        return found


@lru_cache(maxsize=1)
def _counts_per_namespace() -> bool:
    """Before Linux 5.14 the process limit counts all processes of the user, everywhere."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)
