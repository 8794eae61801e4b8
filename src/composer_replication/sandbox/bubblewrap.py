"""Jails made by ``bwrap``: own namespaces for files, processes, network, users and IPC.

Two ways to lose privileges, chosen by who we are. As root the jail is set up without a
user namespace and the command runs under a user id of its own, to which the tree is
handed over: the process limit counts nothing for root. As an ordinary user the jail
gets a user namespace in which no further one can be made.

Each command is started stopped (``--block-fd``): its limits are set and a handle on
the first process of its process namespace is taken before it runs. Killing that first
process makes the kernel kill every other one, however it daemonised; where it is slow to die
the others are killed from outside, too. The command itself waits for a word of ours until the
jail is bound to our life.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from composer_replication.errors import MissingError
from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.bwrap_program import (
    INSTALL,
    START_SECONDS,
    find_bwrap,
    how_to_allow,
    require_bwrap,
    start_problem,
)
from composer_replication.sandbox.calls import HELD_STARTER, failure, new_marker, resource_limits, to_result
from composer_replication.sandbox.child_process import allowed
from composer_replication.sandbox.host_paths import MountPlan
from composer_replication.sandbox.keeper_process import file_with
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.private_folders import SHARED_MEMORY, MemoryFolder, account_files, size_for
from composer_replication.sandbox.privileges import drops_uid, release_uid, reserve_uid, setpriv
from composer_replication.sandbox.process_tree import descendants, is_readable
from composer_replication.sandbox.supervised_run import Watched, read_until, supervise
from composer_replication.sandbox.syscall_filter import filter_program

SECONDS_TO_OBEY = 0.1
"""So long a first process that has been told to end the others is left to it."""
_HANDLES_AT_ONCE = 64
_NUM_INIT_PROCESSES = 1


class HeldJail:
    """One started ``bwrap``, held before it runs the command, and a way to kill all of it.

    The command inside inherits the descriptors ``passed`` under the same numbers. It ``speaks`` through pipes on all
    three streams; otherwise there is one on the last alone, for what ``bwrap`` says.
    """

    def __init__(self, command: Sequence[str], *, passed: Sequence[int] = (), speaks: bool = True) -> None:
        program = require_bwrap()  # named ``bwrap``, whichever it is
        info_read, info_write = os.pipe()
        block_read, block_write = os.pipe()
        self._holding = [info_read, block_write]
        own = [info_write, block_read]
        options = ["--info-fd", str(info_write), "--block-fd", str(block_read)]
        if refusals := filter_program():
            own.append(file_with(refusals))
            options += ["--seccomp", str(own[-1])]
        self.init_pid = 0  # outside, of the jail's first process; known after ``release``
        self._init_pidfd: int | None = None
        self._inside: MemoryFolder | None = None
        try:
            self.process = subprocess.Popen(
                [command[0], *options, *command[1:]],
                executable=program,
                stdin=subprocess.PIPE if speaks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if speaks else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                pass_fds=[*own, *passed],
                start_new_session=True,
            )
        except OSError as error:
            self._close_descriptors()
            raise failure("CR0302", f"bwrap does not start: {error}.") from error
        finally:
            for descriptor in own:
                os.close(descriptor)

    def release(self, limits: list[tuple[int, int]]) -> None:
        """Take hold of the jail's first process, set the limits, let the command run."""
        try:
            info_read, block_write = self._holding
            init = _first_process(info_read)
            self._init_pidfd = os.pidfd_open(init)
            self.init_pid = init
            for kind, value in limits:
                most = allowed(kind, value)
                resource.prlimit(init, kind, (most, most))
            os.write(block_write, b"x")
        except (OSError, ValueError, KeyError) as error:
            self.kill()
            raise failure("CR0302", f"bwrap does not start a jail: {self.last_words() or error}.") from error
        except BaseException:
            self.kill()
            raise

    def own_pipes(self, uid: int | None) -> None:
        """Give the pipes to the user inside: as root, ``/dev/stdout`` could not be opened there otherwise."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None and uid is not None:
                os.fchown(pipe.fileno(), uid, uid)

    def memory_folder(self) -> MemoryFolder:
        """Its ``/dev/shm``, which is a tmpfs; ask once everything is mounted and nothing of the command ran yet."""
        assert self._init_pidfd is not None
        try:
            place = f"/proc/{self.init_pid}/root{SHARED_MEMORY}"
            self._inside = MemoryFolder(os.open(place, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            why = f"the jail's {SHARED_MEMORY} cannot be watched: {error.strerror}."
            raise failure("CR0302", why) from error
        if is_readable(self._init_pidfd, 0):  # its number may have been another process's already
            raise failure("CR0302", "the jail ended before the command began.")
        return self._inside

    def kill(self) -> None:
        """Kill every process of the jail and wait until they are gone."""
        if self._init_pidfd is not None and self._kill_first_process(self._init_pidfd):
            # It ends by itself, and collects that one, unless the command has stopped it with its whole group.
            self.process.send_signal(signal.SIGCONT)
        else:
            self.process.kill()
        self.process.wait()
        if self._init_pidfd is not None:
            # Orphaned, it belongs to process 1, which collects it. In a container that may be us.
            with suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._init_pidfd, os.WEXITED | os.WNOHANG)

    def _kill_first_process(self, first: int) -> bool:
        """Whether it has ended, and so everything inside."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        deadline = time.monotonic() + START_SECONDS
        while not is_readable(first, SECONDS_TO_OBEY):
            if time.monotonic() > deadline:
                return False
            self.kill_others()
        return True

    def kill_others(self) -> None:
        """Kill what lives below the first process now, from outside: it may be kept from every processor itself.

        What is born meanwhile may live; call it again.
        """
        pids = descendants(self.init_pid)
        for start in range(0, len(pids), _HANDLES_AT_ONCE):
            self._kill_through_handles(pids[start : start + _HANDLES_AT_ONCE])

    def _kill_through_handles(self, pids: Sequence[int]) -> None:
        handles: dict[int, int] = {}
        try:
            for pid in pids:
                with suppress(OSError):  # gone
                    handles[pid] = os.pidfd_open(pid)
            # What is below it still is what the handle is on, or dead: a number may be another process's by now.
            below = descendants(self.init_pid)
            if self._init_pidfd is None or is_readable(self._init_pidfd, 0):
                return  # and so may its own number
            for pid in handles.keys() & below:
                with suppress(OSError):
                    signal.pidfd_send_signal(handles[pid], signal.SIGKILL)
        finally:
            for handle in handles.values():
                os.close(handle)

    def let_go(self) -> None:
        """It is free for good: close what only held it."""
        for descriptor in self._holding:
            os.close(descriptor)
        self._holding = []

    def last_words(self) -> str:
        """What it said as its last, once it is killed."""
        if self.process.stderr is None:
            return ""
        return self.process.stderr.read(2000).decode(errors="replace").strip()[-500:]

    def _close_descriptors(self) -> None:
        self.let_go()
        if self._init_pidfd is not None:
            os.close(self._init_pidfd)
        self._init_pidfd = None
        if self._inside is not None:
            self._inside.close()
        self._inside = None

    def __enter__(self) -> HeldJail:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._close_descriptors()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _first_process(descriptor: int) -> int:
    """The process id outside of a jail's first process; ``bwrap`` writes JSON with the key ``child-pid``."""
    text = b""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if is_readable(descriptor, 1.0):
            chunk = os.read(descriptor, 4096)
            text += chunk
            if not chunk or text.rstrip().endswith(b"}"):
                break
    return int(json.loads(text)["child-pid"])


class Bubblewrap:
    """The backend ``bubblewrap``."""

    name = "bubblewrap"

    def is_available(self) -> Check:
        """Can a jail be started here? Starts one that runs ``true``."""
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
        """Take over ``spec.tree`` and prepare a jail around it."""
        self.require_programs()
        return BubblewrapSandbox(spec)

    def require_programs(self) -> None:
        """Are the programs there?"""
        require_bwrap()
        if drops_uid() and setpriv() is None:
            raise MissingError("CR0301", "the program setpriv is not installed.", fix="install util-linux")


class BubblewrapSandbox(LocalSandbox):
    """One jail; ``exec`` may be called from several threads at once."""

    _num_first_processes = 0
    """Of ours inside, which count as processes of the jail's user."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._uid = reserve_uid() if drops_uid() else None
        try:
            super().__init__(spec, self._uid)
        except BaseException:
            release_uid(self._uid)
            raise
        try:
            uid, gid = (self._uid, self._uid) if self._uid is not None else (os.getuid(), os.getgid())
            for name, text in account_files(uid, gid, self._scratch.home).items():
                self._scratch.write(name, text)
            shared = None
            if self._uid is None:  # to root the kernel tells the size of each file, on disk too
                shared = size_for(spec.limits.memory_bytes, spec.limits.disk_bytes)
            self._mounts = MountPlan(spec, self._scratch, shared_memory_bytes=shared)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise failure("CR0302", f"a jail cannot be prepared: {error.strerror or error}.") from error
            raise

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        marker = new_marker()
        started = time.monotonic()
        with (
            self._scratch.for_one_command(self._uid) as fresh,
            HeldJail(self._command(argv, environment, marker, fresh, has_stdin=bool(stdin))) as jail,
        ):
            jail.release(self._resource_limits())
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
                watched=Watched(
                    self._limits,
                    (*self._writable, fresh),
                    self._baseline_bytes,
                    num_own_processes=_NUM_INIT_PROCESSES,
                    memory=memory,
                ),
                early_stderr=early,
            )
        ended = replace(ended, seconds=time.monotonic() - started)
        return to_result(ended, marker.encode(), self._limits, backend=Bubblewrap.name)

    def _command(
        self, argv: Sequence[str], env: Mapping[str, str], marker: str, fresh: Path, *, has_stdin: bool
    ) -> list[str]:
        # As in a warm jail: some programs read a pipe in the place of files, although nothing comes.
        start = HELD_STARTER if has_stdin else f"{HELD_STARTER} </dev/null"
        # Before it is the user inside, nobody may be allowed into the tree.
        start = f'cd -- "$1" && unset OLDPWD && shift || exit 125; {start}'
        starter = ["/bin/sh", "-c", start, "sandbox", str(self._real_tree), marker, *argv]
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

    def _resource_limits(self) -> list[tuple[int, int]]:
        found, most = resource_limits(self._limits), self._limits.num_processes
        if self._uid is not None:
            found.append((resource.RLIMIT_NPROC, most + self._num_first_processes))
        elif _counts_per_namespace():
            found.append((resource.RLIMIT_NPROC, most + _NUM_INIT_PROCESSES))
        return found


@lru_cache(maxsize=1)
def _counts_per_namespace() -> bool:
    """Before Linux 5.14 the process limit counts all processes of the user, everywhere."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)
