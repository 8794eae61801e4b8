"""Jails made by ``bwrap`` that stay: one process inside takes orders, so that a command costs a message.

The walls are those of ``bubblewrap``; they are built once. What is new for each command in a cold jail is made as new
here: no process lives on, ``/tmp`` and ``/dev/shm`` are emptied, the streams, the session and the variables are its own. A
command that ends the jail, or changes a mount point or a temporary folder of it, gets its result, and the next one gets a
new jail.

The frames of the orders are described in ``warm_server``. A command never holds an end of the socket that they travel
on; its output comes through pipes of ours, and how it ended is said by the first process of the jail, which it cannot
reach.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import IO

from composer_replication.interfaces import Sandbox
from composer_replication.records import Check, ExecResult, SandboxSpec
from composer_replication.sandbox.bubblewrap import SECONDS_TO_OBEY, Bubblewrap, BubblewrapSandbox, HeldJail
from composer_replication.sandbox.bwrap_program import START_SECONDS
from composer_replication.sandbox.calls import as_record, failure
from composer_replication.sandbox.host_paths import base_python
from composer_replication.sandbox.keeper_process import file_with
from composer_replication.sandbox.private_folders import FreshFolders, MemoryFolder
from composer_replication.sandbox.privileges import setpriv
from composer_replication.sandbox.supervised_run import Verdict, Watched, supervise
from composer_replication.sandbox.syscall_filter import filter_program

_TOOK_THE_JAIL = "it ended the process that keeps the jail"
_HEADER = struct.Struct("!cI")
_ENDED = struct.Struct("!ci")
_END_SECONDS = 10.0  # everything was killed: only a kernel that is stuck takes longer
_CHUNK_BYTES = 1 << 16
_NO_FILE = 2
_NOT_FOUND, _NOT_STARTED = 127, 126
_KILLED = -9
_LOADER = "import os, sys; exec(os.read(int(sys.argv[1]), 1 << 20))"  # the source is no business of ps


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
        """Take over ``spec.tree``; the jail starts with the first command."""
        self.require_programs()
        return WarmBubblewrapSandbox(spec)


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
                command = jail.start(argv, environment, with_stdin=bool(stdin))
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
        return as_record(ended, stderr, self._limits, stopped=stopped)

    def _ready_jail(self) -> WarmJail:
        if self._jail is not None and not self._jail.is_alive():
            self._end_jail()
        if self._jail is not None:
            return self._jail
        try:
            fresh = self._life.enter_context(self._scratch.for_one_command(self._uid))
            walls = self._walls({"LANG": "C.UTF-8"}, fresh, queues="/dev/mqueue")
            self._jail = WarmJail(walls, self._real_tree, self._uid, self._resource_limits())
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
        jail, self._jail, self._memory = self._jail, None, None
        try:
            if jail is not None:
                jail.close()
        finally:
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

    def close(self) -> None:
        """End the jail, give the tree back, remove the scratch folder and the snapshots; idempotent."""
        self._end(self._end_jail)


class _BrokenError(Exception):
    """The first process of the jail does not answer any more."""


class WarmJail:
    """One started jail that runs one command after the other, in ``tree``, as ``uid`` (None: as ourselves), within ``limits``."""

    def __init__(
        self, walls: Sequence[str], tree: Path, uid: int | None, limits: list[tuple[int, int]]
    ) -> None:
        self.uid = uid
        self.is_broken = False
        self._socket, theirs = socket.socketpair()
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
            self._receive(b"U", START_SECONDS)
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

    def start(self, argv: Sequence[str], env: Mapping[str, str], *, with_stdin: bool) -> WarmCommand:
        """Order one command; call only when the one before is finished."""
        fields = "\0".join((*argv, *(f"{name}={value}" for name, value in env.items()), ""))
        payload = len(argv).to_bytes(4, "big") + os.fsencode(fields)
        command = WarmCommand(self, argv[0], with_stdin=with_stdin)
        try:
            self._send(b"R", payload, command.inner)
        except BaseException as error:
            self.close()
            command.discard()
            if isinstance(error, OSError):
                raise failure("CR0302", f"the warm jail is gone: {error}.") from error
            raise
        finally:
            command.close_inner()
        return command

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
        self._send(b"K", b"")
        deadline = time.monotonic() + _END_SECONDS
        while not self._says_something(SECONDS_TO_OBEY) and time.monotonic() < deadline:
            self.held.kill_others()

    def _send(self, kind: bytes, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        frame = _HEADER.pack(kind, len(payload)) + payload
        sent = socket.send_fds(self._socket, [frame], list(descriptors)) if descriptors else 0
        if sent < len(frame):  # once it has all of it, that it has ended by now is the command's end
            self._socket.sendall(frame[sent:])

    def _receive(self, kind: bytes, seconds: float) -> bytes:
        answer = b""
        while len(answer) < _HEADER.size or len(answer) < _HEADER.size + _HEADER.unpack_from(answer)[1]:
            try:  # it is mostly there already
                chunk = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not self._says_something(seconds):
                    raise _BrokenError("it did not answer in time") from None
                continue
            if not chunk:
                raise _BrokenError("its first process ended")
            answer += chunk
            if answer[:1] != kind:
                raise _BrokenError("it answered something else")
        return answer[_HEADER.size :]

    def _says_something(self, seconds: float) -> bool:
        return bool(self._poller.poll(seconds * 1000))

    def close(self) -> None:
        """Kill everything inside and wait until it is gone; idempotent."""
        self.is_broken = True
        self._socket.close()
        self.held.__exit__()


class WarmCommand:
    """One command of a warm jail, with pipes as a ``subprocess.Popen`` has them."""

    def __init__(self, jail: WarmJail, program: str, *, with_stdin: bool) -> None:
        self.jail = jail
        self.pid = jail.held.init_pid
        self.program = program
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self.refusal = ""
        self.took_the_jail = False
        self._code: int | None = None
        self.inner: list[int] = []
        try:
            if with_stdin:
                read, write = os.pipe2(os.O_CLOEXEC)
                self.inner.append(read)
                self.stdin = FileIO(write, "wb")
            self.stdout, self.stderr = self._output(), self._output()
            if jail.uid is not None:  # so that it can open /dev/stdout, whose pipe is ours
                for descriptor in self.inner:
                    os.fchown(descriptor, jail.uid, jail.uid)
            if not with_stdin:  # an input that is at its end
                self.inner.insert(0, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self.close_inner()
            self.discard()
            raise failure("CR0302", f"no pipes for a command: {error}.") from error

    def _output(self) -> FileIO:
        read, write = os.pipe2(os.O_CLOEXEC)
        self.inner.append(write)
        return FileIO(read, "rb")

    def close_inner(self) -> None:
        """Close our copies of the ends that the command has by now."""
        for descriptor in self.inner:
            os.close(descriptor)
        self.inner = []

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
