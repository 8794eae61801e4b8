"""The outer end of a warm jail: starts it, gives orders to its first process, believes nobody else.

The frames are described in ``warm_server``. A command never holds an end of the socket that
they travel on; its output comes through pipes of ours, and how it ended is said by the
first process of the jail, which it cannot reach.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path

from composer_replication.sandbox.bwrap_program import START_SECONDS
from composer_replication.sandbox.held_jail import SECONDS_TO_OBEY, HeldJail, file_with
from composer_replication.sandbox.jailed_tree import failure
from composer_replication.sandbox.memory_folder import MemoryFolder
from composer_replication.sandbox.privileges import setpriv

_HEADER = struct.Struct("!cI")
_ENDED = struct.Struct("!ci")
_END_SECONDS = 10.0  # everything was killed: only a kernel that is stuck takes longer
_CHUNK_BYTES = 1 << 16
_NO_FILE = 2
_NOT_FOUND, _NOT_STARTED = 127, 126
_KILLED = -9
_LOADER = "import os, sys; exec(os.read(int(sys.argv[1]), 1 << 20))"  # the source is no business of ps


@cache
def _server_source() -> bytes:
    """The program that becomes the first process of a jail."""
    return Path(__file__).with_name("warm_server.py").read_bytes()


@cache
def _null() -> int:
    """An input that is at its end."""
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class _BrokenError(Exception):
    """The first process of the jail does not answer any more."""


class WarmJail:
    """One started jail that runs one command after the other.

    Args:
        walls: arguments for ``bwrap``, as for a command.
        tree: where commands start.
        python: the interpreter inside.
        uid: whom commands run as, or None: as ourselves.
        limits: resource limits, which every command inherits.

    Raises:
        SandboxFailure: it does not start (CR0302).
    """

    def __init__(
        self,
        walls: Sequence[str],
        tree: Path,
        python: Path,
        uid: int | None,
        limits: list[tuple[int, int]],
    ) -> None:
        self.uid = uid
        self.is_broken = False
        self._socket, theirs = socket.socketpair()
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        passed = (file_with(_server_source()), theirs.fileno(), os.pidfd_open(os.getpid()))
        server = [str(python), "-I", "-S", "-B", "-c", _LOADER, *map(str, passed)]
        server += ["-" if uid is None else str(uid), str(tree)]
        # Ambient capabilities would reach the commands; as root it keeps those that change the user id.
        few = [setpriv() or "setpriv", "--inh-caps=-all", "--bounding-set=-all,+setuid,+setgid"]
        start = server if uid is None else [*few, *server]
        try:
            command = ["bwrap", "--as-pid-1", *walls, "--", *start]
            self._held = HeldJail(command, passed=passed, speaks=False)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
            os.close(passed[0])
            os.close(passed[2])
        try:
            self._held.release(limits)
            self._await_first_answer()
            self._held.let_go()
        except BaseException:
            self.close()
            raise

    def _await_first_answer(self) -> None:
        try:
            self._receive(b"U", START_SECONDS)
        except _BrokenError as error:
            self.close(keeps_words=True)
            raise failure(
                "CR0302", f"a warm jail does not start: {self._held.last_words() or error}."
            ) from error

    @property
    def pid(self) -> int:
        """The first process of the jail, as seen from outside."""
        return self._held.init_pid

    @property
    def descriptor(self) -> int:
        """Readable once a command has ended, or the jail."""
        return self._socket.fileno()

    def memory_folder(self) -> MemoryFolder:
        """Its ``/dev/shm``, where that is a tmpfs; ask before the first command.

        Raises:
            SandboxFailure: the jail has ended (CR0302).
        """
        return self._held.memory_folder()

    def is_alive(self) -> bool:
        """Does it take orders? Asked between commands, when it has nothing to say."""
        return not self.is_broken and not self._says_something(0)

    def start(self, argv: Sequence[str], env: Mapping[str, str], *, with_stdin: bool) -> WarmCommand:
        """Order one command; call only when the one before is finished.

        Raises:
            SandboxFailure: the jail is gone (CR0302).
        """
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
            self._held.kill_others()

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

    def close(self, *, keeps_words: bool = False) -> None:
        """Kill everything inside and wait until it is gone; idempotent."""
        self.is_broken = True
        self._held.kill()
        self._socket.close()
        if not keeps_words:
            self._held.__exit__()


class WarmCommand:
    """One command of a warm jail, with pipes as a ``subprocess.Popen`` has them."""

    def __init__(self, jail: WarmJail, program: str, *, with_stdin: bool) -> None:
        self.jail = jail
        self.pid = jail.pid
        self.program = program
        self.stdin: FileIO | None = None
        self.refusal = ""
        self.took_the_jail = False
        self._code: int | None = None
        self.inner: list[int] = []
        try:
            if with_stdin:
                read, write = os.pipe2(os.O_CLOEXEC)
                self.inner.append(read)
                self.stdin = FileIO(write, "wb")
            self.stdout = self._output()
            self.stderr = self._output()
            if jail.uid is not None:  # so that it can open /dev/stdout, whose pipe is ours
                for descriptor in self.inner:
                    os.fchown(descriptor, jail.uid, jail.uid)
        except OSError as error:
            self.close_inner()
            self.discard()
            raise failure("CR0302", f"no pipes for a command: {error}.") from error
        if not with_stdin:
            self.inner.insert(0, _null())

    def _output(self) -> FileIO:
        read, write = os.pipe2(os.O_CLOEXEC)
        self.inner.append(write)
        return FileIO(read, "rb")

    def close_inner(self) -> None:
        """Close our copies of the ends that the command has by now."""
        for descriptor in self.inner:
            if descriptor != _null():
                os.close(descriptor)
        self.inner = []

    def discard(self) -> None:
        """Close our own ends: there is no command."""
        for pipe in (self.stdin, getattr(self, "stdout", None), getattr(self, "stderr", None)):
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


def settings_of(pid: int, *, limits: bool = True) -> tuple[object, ...]:
    """Priority, scheduler and processors: what a command can set for another process of its user.

    Args:
        pid: the other process.
        limits: the resource limits too, which only a process with the very same user ids can set.
    """
    return (
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getscheduler(pid),
        os.sched_getaffinity(pid),
        Path(f"/proc/{pid}/limits").read_text() if limits else "",
    )
