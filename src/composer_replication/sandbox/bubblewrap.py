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

A jail of ``bubblewrap-warm`` stays: one process inside takes orders, so that a command costs a message. The walls are
the same and are built once. What is new for each command in a cold jail is made as new: no process lives on, ``/tmp`` and
``/dev/shm`` are emptied, the streams, the session and the variables are its own. A command that ends the jail, or changes
a mount point or a temporary folder of it, gets its result, and the next one gets a new jail.

The messages of the orders are described in ``warm_server``. A command never holds an end of the socket that they travel
on; its output comes through pipes of ours, and how it ended is said by the first process of the jail, which it cannot
reach.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import IO

from composer_replication.errors import MissingError
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox import bwrap_program, calls
from composer_replication.sandbox.calls import failure
from composer_replication.sandbox.child_process import allowed
from composer_replication.sandbox.folders import SHARED_MEMORY, FreshFolders, MemoryFolder, size_for
from composer_replication.sandbox.host_paths import MountPlan, base_python
from composer_replication.sandbox.keeper_process import file_with
from composer_replication.sandbox.local_sandbox import LocalSandbox
from composer_replication.sandbox.privileges import drops_uid, release_uid, reserve_uid, setpriv
from composer_replication.sandbox.process_folder import account_files
from composer_replication.sandbox.process_tree import descendants, is_readable
from composer_replication.sandbox.supervised_run import Verdict, Watched, read_until, supervise
from composer_replication.sandbox.syscall_filter import filter_program

_SECONDS_TO_OBEY = 0.1
"""So long a first process that has been told to end the others is left to it."""
_HANDLES_AT_ONCE = 64
_NUM_INIT_PROCESSES = 1
_TOOK_THE_JAIL = "it ended the process that keeps the jail"
_ENDED = struct.Struct("!ci")
_END_SECONDS = 10.0  # everything was killed: only a kernel that is stuck takes longer
_MOST_ANSWER_BYTES = 64
_NO_FILE = 2
_NOT_FOUND, _NOT_STARTED = 127, 126
_KILLED = -9
_LOADER = "import os, sys; exec(os.read(int(sys.argv[1]), 1 << 20))"  # the source is no business of ps


class HeldJail:
    """One started ``bwrap``, held before it runs the command, and a way to kill all of it.

    The command inside inherits the descriptors ``passed`` under the same numbers. It ``speaks`` through pipes on all
    three streams; otherwise there is one on the last alone, for what ``bwrap`` says.
    """

    def __init__(self, command: Sequence[str], *, passed: Sequence[int] = (), speaks: bool = True) -> None:
        program = bwrap_program.require_bwrap()  # named ``bwrap``, whichever it is
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
            deadline = time.monotonic() + bwrap_program.START_SECONDS
            # JSON; who gave up here would have no hold on the jail.
            told = read_until(b"}", info_read, deadline, interrupted_too=True)
            init = int(json.loads(told)["child-pid"])
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
        deadline = time.monotonic() + bwrap_program.START_SECONDS
        while not is_readable(first, _SECONDS_TO_OBEY):
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
        marker = calls.new_marker()
        started = time.monotonic()
        with (
            self._scratch.for_one_command(self._uid) as fresh,
            HeldJail(self._command(argv, environment, marker, fresh, has_stdin=bool(stdin))) as jail,
        ):
            jail.release(self._resource_limits())
            jail.own_pipes(self._uid)
            # By now the jail dies with us. Before, the signal for that is not asked for yet: a jail that
            # we do not live to see must not run the command.
            assert jail.process.stderr is not None
            early = read_until(marker.encode(), jail.process.stderr.fileno(), started + timeout_seconds)
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
        return calls.to_result(ended, marker.encode(), self._limits, backend=Bubblewrap.name)

    def _command(
        self, argv: Sequence[str], env: Mapping[str, str], marker: str, fresh: Path, *, has_stdin: bool
    ) -> list[str]:
        # As in a warm jail: some programs read a pipe in the place of files, although nothing comes.
        start = calls.HELD_STARTER if has_stdin else f"{calls.HELD_STARTER} </dev/null"
        # Before it is the user inside, nobody may be allowed into the tree.
        start = f'cd -- "$1" && unset OLDPWD && shift || exit 125; {start}'
        starter = ["/bin/sh", "-c", start, "sandbox", str(self._real_tree), marker, *argv]
        # What the command is given must not choose or change what still runs with privileges.
        starter = ["/usr/bin/env", "-i", "--", *(f"{name}={value}" for name, value in env.items()), *starter]
        if self._uid is not None:
            user = str(self._uid)
            drop = [setpriv() or "setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
            starter = [*drop, "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs", *starter]
        return ["bwrap", "--die-with-parent", *self._walls(fresh), "--chdir", "/", "--", *starter]

    def _walls(self, fresh: Path, *, queues: str = "") -> list[str]:
        """The namespaces, privileges and files of a jail without any variables, as arguments for ``bwrap``."""
        walls = ["--unshare-ipc", "--unshare-pid", "--unshare-net"]
        walls += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
        if self._uid is None:
            walls += ["--unshare-user", "--disable-userns"]
        else:
            walls += ["--cap-drop", "ALL"]  # and of the three the last is for giving up the others for good
            for name in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
                walls += ["--cap-add", name]
        return [*walls, *self._mounts.arguments(fresh, queues=queues), "--clearenv"]

    def _resource_limits(self) -> list[tuple[int, int]]:
        found, most = calls.resource_limits(self._limits), self._limits.num_processes
        if self._uid is not None:
            found.append((resource.RLIMIT_NPROC, most + self._num_first_processes))
        elif _counts_per_namespace():
            found.append((resource.RLIMIT_NPROC, most + _NUM_INIT_PROCESSES))
        return found


def _output(inner: list[int]) -> FileIO:
    read, write = os.pipe2(os.O_CLOEXEC)
    inner.append(write)
    return FileIO(read, "rb")


@lru_cache(maxsize=1)
def _counts_per_namespace() -> bool:
    """Before Linux 5.14 the process limit counts all processes of the user, everywhere."""
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


class WarmBubblewrapSandbox(BubblewrapSandbox):
    """One jail that stays. ``exec`` may be called from several threads at once.

    While it runs a command, further ones get a jail of their own, as cold ones do; so does
    every command in a forked child of the process that opened the sandbox.
    """

    _num_first_processes = 1

    def __init__(self, spec: SandboxSpec) -> None:
        self._opener = os.getpid()
        self._slot = threading.Lock()
        self._jail: WarmJail | None = None
        self._memory: MemoryFolder | None = None
        self._life = ExitStack()
        super().__init__(spec)

    @property
    def jail_pid(self) -> int | None:
        """The first process of the jail as seen from outside; None while there is none."""
        return None if self._jail is None else self._jail.held.init_pid

    def _run(
        self, argv: list[str], environment: Mapping[str, str], stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        if os.getpid() != self._opener or not self._slot.acquire(blocking=False):
            return super()._run(argv, environment, stdin, timeout_seconds)
        try:
            jail = self._ready_jail()
            try:
                command = WarmCommand(jail, argv, environment, with_stdin=bool(stdin))
                return self._supervised(jail, command, stdin, timeout_seconds)
            finally:
                self._sweep()
        finally:
            self._slot.release()

    def _supervised(
        self, jail: WarmJail, command: WarmCommand, stdin: bytes, timeout_seconds: float
    ) -> ExecResult:
        folders, closed = (*self._writable, *self._fresh.roots), self._fresh.closed
        watched = Watched(self._limits, folders, self._baseline_bytes, closed=closed, memory=self._memory)
        try:
            ended = supervise(
                command,
                command.finish,
                stdin=stdin,
                timeout_seconds=timeout_seconds,
                watched=watched,
                end_descriptor=jail.descriptor,
            )
        finally:
            command.discard()
        stopped, stderr = "", ended.stderr
        if ended.verdict is Verdict.ENDED:
            stopped = _TOOK_THE_JAIL if command.took_the_jail else ""
            stderr += f"{command.refusal}\n".encode() if command.refusal else b""
        return calls.as_record(ended, stderr, self._limits, stopped=stopped)

    def _ready_jail(self) -> WarmJail:
        if self._jail is not None and not self._jail.is_alive():
            self._end_jail()
        if self._jail is not None:
            return self._jail
        try:
            fresh = self._life.enter_context(self._scratch.for_one_command(self._uid))
            walls = [*self._walls(fresh, queues="/dev/mqueue"), "--setenv", "LANG", "C.UTF-8"]
            self._jail = WarmJail(walls, self._real_tree, self._uid, self._resource_limits())
            self._life.callback(self._jail.close)
            self._fresh = FreshFolders(tuple(sorted(fresh.iterdir())))
            self._memory = self._jail.held.memory_folder() if self._uid is None else None
        except BaseException:
            self._end_jail()
            raise
        return self._jail

    def _end_jail(self) -> None:
        """Kill it and take its own folders away; the next command gets a new one."""
        if os.getpid() != self._opener:
            return
        self._jail = self._memory = None
        self._life.close()

    def _sweep(self) -> None:
        """Give the next command an empty ``/tmp`` and ``/dev/shm``, or else a new jail."""
        jail = self._jail
        try:
            is_whole = jail is not None and not jail.is_broken and self._fresh.clear()
            is_whole = is_whole and (self._memory is None or self._memory.is_untouched())
        except OSError:
            is_whole = False
        if not is_whole:
            self._end_jail()


class _BrokenError(Exception):
    """The first process of the jail does not answer any more."""


class WarmJail:
    """One started jail that runs one command after the other, in ``tree``, as ``uid`` (None: as ourselves), within ``limits``."""

    def __init__(
        self, walls: Sequence[str], tree: Path, uid: int | None, limits: list[tuple[int, int]]
    ) -> None:
        self.uid = uid
        self.is_broken = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptor = self._socket.fileno()
        """Readable once a command has ended, or the jail."""
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        source = Path(__file__).with_name("warm_server.py").read_bytes()
        passed = (file_with(source), theirs.fileno(), os.pidfd_open(os.getpid()))
        server = [str(base_python()), "-I", "-S", "-B", "-c", _LOADER, *map(str, passed)]
        server += ["-" if uid is None else str(uid), str(tree)]
        # Ambient capabilities would reach the commands; as root it keeps those that change the user id.
        few = [setpriv() or "setpriv", "--inh-caps=-all", "--bounding-set=-all,+setuid,+setgid"]
        start = server if uid is None else [*few, *server]
        try:
            command = ["bwrap", "--as-pid-1", *walls, "--", *start]
            self.held = HeldJail(command, passed=passed, speaks=False)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
            os.close(passed[0])
            os.close(passed[2])
        try:
            self.held.release(limits)
            self._receive(b"U", bwrap_program.START_SECONDS)
            self.held.let_go()
        except _BrokenError as error:
            self.held.kill()
            said = self.held.last_words() or error
            self.close()
            raise failure("CR0302", f"a warm jail does not start: {said}.") from error
        except BaseException:
            self.close()
            raise

    def is_alive(self) -> bool:
        """Does it take orders? Asked between commands, when it has nothing to say."""
        return not self.is_broken and not self._says_something(0)

    def order(self, argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> None:
        """Have a command started with these three; call only when the one before is finished."""
        fields = "\0".join((*argv, *(f"{name}={value}" for name, value in env.items()), ""))
        order = file_with(len(argv).to_bytes(4, "big") + os.fsencode(fields))
        try:
            self._send(b"R", (order, *streams))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise failure("CR0302", f"the warm jail is gone: {error}.") from error
            raise
        finally:
            os.close(order)

    def finish(self) -> tuple[bool, int] | None:
        """Whether the command was started, and its exit code or why not; None if it took the jail with it.

        Kills what runs unless it has ended. When this returns no process of the command lives.
        """
        try:
            if not self._says_something(0):
                self._end_command()
            kind, number = _ENDED.unpack(self._receive(b"R", _END_SECONDS))
        except (OSError, _BrokenError, struct.error):
            self.close()
            return None
        except BaseException:
            self.close()
            raise
        return kind == b"E", number

    def _end_command(self) -> None:
        """Have it killed by the first process, which may be kept from every processor: then from here, too."""
        self._send(b"K")
        deadline = time.monotonic() + _END_SECONDS
        while not self._says_something(_SECONDS_TO_OBEY) and time.monotonic() < deadline:
            self.held.kill_others()

    def _send(self, kind: bytes, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._socket, [kind], descriptors)

    def _receive(self, kind: bytes, seconds: float) -> bytes:
        if not self._says_something(seconds):
            raise _BrokenError("it did not answer in time")
        answer = self._socket.recv(_MOST_ANSWER_BYTES)
        if not answer:
            raise _BrokenError("its first process ended")
        if answer[:1] != kind:
            raise _BrokenError("it answered something else")
        return answer[1:]

    def _says_something(self, seconds: float) -> bool:
        return bool(self._poller.poll(seconds * 1000))

    def close(self) -> None:
        """Kill everything inside and wait until it is gone; idempotent."""
        self.is_broken = True
        self._socket.close()
        self.held.__exit__()


class WarmCommand:
    """One started command of a warm jail, with pipes as a ``subprocess.Popen`` has them."""

    def __init__(
        self, jail: WarmJail, argv: Sequence[str], env: Mapping[str, str], *, with_stdin: bool
    ) -> None:
        self.jail = jail
        self.pid = jail.held.init_pid
        self.program = argv[0]
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self.refusal = ""
        self.took_the_jail = False
        self._code: int | None = None
        inner: list[int] = []  # the ends that the command has
        try:
            if with_stdin:
                read, write = os.pipe2(os.O_CLOEXEC)
                inner.append(read)
                self.stdin = FileIO(write, "wb")
            self.stdout, self.stderr = _output(inner), _output(inner)
            if jail.uid is not None:  # so that it can open /dev/stdout, whose pipe is ours
                for descriptor in inner:
                    os.fchown(descriptor, jail.uid, jail.uid)
            if not with_stdin:  # an input that is at its end
                inner.insert(0, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            jail.order(argv, env, inner)
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise failure("CR0302", f"no pipes for a command: {error}.") from error
            raise
        finally:
            for descriptor in inner:
                os.close(descriptor)

    def discard(self) -> None:
        """Close our own ends: there is no command."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def finish(self) -> None:
        """Kill the command unless it has ended; afterwards no process of it lives. May be called again."""
        if self._code is not None:
            return
        self._code = _KILLED
        ended = self.jail.finish()
        if ended is None:
            self.took_the_jail = True
        elif ended[0]:
            self._code = ended[1]
        else:
            self._code = _NOT_FOUND if ended[1] == _NO_FILE else _NOT_STARTED
            self.refusal = f"{self.program}: {'not found' if ended[1] == _NO_FILE else os.strerror(ended[1])}"

    def wait(self) -> int:
        """The exit code, -N for signal N, 127 or 126 where nothing could be started."""
        self.finish()
        assert self._code is not None
        return self._code


class Bubblewrap:
    """The backend ``bubblewrap``."""

    name = "bubblewrap"
    _kind = BubblewrapSandbox

    def is_available(self) -> Check:
        """Can a jail be started here? Starts one that runs ``true``."""
        program = bwrap_program.find_bwrap()
        if program is None:
            return Check(self.name, False, "the program bwrap is not installed.", bwrap_program.INSTALL)
        if drops_uid() and setpriv() is None:
            return Check(self.name, False, "setpriv is not on PATH.", "install util-linux")
        which = f"{program.path} ({program.origin})"
        if problem := bwrap_program.start_problem(program.path):
            fix = bwrap_program.how_to_allow(program.path)
            return Check(self.name, False, f"{which} cannot start a jail: {problem}", fix)
        return Check(self.name, True, f"{which} starts a jail.")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        """Take over ``spec.tree`` and prepare a jail around it; a warm one starts with the first command."""
        bwrap_program.require_bwrap()
        if drops_uid() and setpriv() is None:
            raise MissingError("CR0301", "the program setpriv is not installed.", fix="install util-linux")
        return self._kind(spec)


class WarmBubblewrap(Bubblewrap):
    """The backend ``bubblewrap-warm``."""

    name = "bubblewrap-warm"
    _kind = WarmBubblewrapSandbox

    def is_available(self) -> Check:
        """As ``bubblewrap``, on a machine whose system calls the filter knows."""
        check = super().is_available()
        if check.ok and not filter_program():
            detail = f"message queues and kernel keys cannot be refused on {os.uname().machine}."
            return Check(self.name, False, detail, "use --backend bubblewrap")
        return Check(self.name, check.ok, check.detail, check.fix)
