"""A jail that ``bwrap`` has made and that waits before it runs anything.

Its limits are set and a handle on the first process of its process namespace is taken
meanwhile. Killing that first process makes the kernel kill every other one, however it
daemonised. Where it is slow to die the others are killed from outside, too.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from composer_replication.sandbox.bwrap_program import START_SECONDS, require_bwrap
from composer_replication.sandbox.jailed_tree import failure
from composer_replication.sandbox.memory_folder import PLACE, MemoryFolder
from composer_replication.sandbox.process_tree import descendants
from composer_replication.sandbox.syscall_filter import filter_program

SECONDS_TO_OBEY = 0.1
"""So long a first process that has been told to end the others is left to it."""
_HANDLES_AT_ONCE = 64
_MFD_NOEXEC_SEAL = 8  # where the machine allows files in memory only so (vm.memfd_noexec)


class HeldJail:
    """One started ``bwrap``, held before it runs the command, and a way to kill all of it.

    Args:
        command: ``bwrap`` with its arguments; by that name, whichever program it is.
        passed: descriptors of ours that the command inside inherits under the same numbers.
        speaks: with pipes on all three streams; otherwise on the last alone, for what ``bwrap`` says.

    Raises:
        SandboxFailure: ``bwrap`` does not start (CR0302).
    """

    def __init__(self, command: Sequence[str], *, passed: Sequence[int] = (), speaks: bool = True) -> None:
        program = require_bwrap()
        info_read, info_write = os.pipe()
        block_read, block_write = os.pipe()
        self._holding = [info_read, block_write]
        own = [info_write, block_read]
        options = ["--info-fd", str(info_write), "--block-fd", str(block_read)]
        if refusals := filter_program():
            own.append(file_with(refusals))
            options += ["--seccomp", str(own[-1])]
        self._init_pid = 0
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
            self._init_pid = init
            for kind, value in limits:
                resource.prlimit(init, kind, (value, value))
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

    @property
    def init_pid(self) -> int:
        """The process id of the jail's first process outside; 0 before ``release``."""
        return self._init_pid

    def memory_folder(self) -> MemoryFolder:
        """Its ``/dev/shm``, which is a tmpfs; ask once everything is mounted and nothing of the command ran yet.

        Raises:
            SandboxFailure: the jail has ended (CR0302).
        """
        assert self._init_pidfd is not None
        try:
            place = f"/proc/{self._init_pid}/root{PLACE}"
            self._inside = MemoryFolder(os.open(place, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise failure("CR0302", f"the jail's {PLACE} cannot be watched: {error.strerror}.") from error
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
        pids = descendants(self._init_pid)
        for start in range(0, len(pids), _HANDLES_AT_ONCE):
            self._kill_through_handles(pids[start : start + _HANDLES_AT_ONCE])

    def _kill_through_handles(self, pids: Sequence[int]) -> None:
        handles: dict[int, int] = {}
        try:
            for pid in pids:
                with suppress(OSError):  # gone
                    handles[pid] = os.pidfd_open(pid)
            # What is below it still is what the handle is on, or dead: a number may be another process's by now.
            below = descendants(self._init_pid)
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


def is_readable(descriptor: int, seconds: float) -> bool:
    """Wait until there is something to read; like ``select``, for descriptors of any number."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def file_with(data: bytes) -> int:
    """A file in memory that holds ``data``, to be read from its start.

    No pipe: once a jail has used up what pipes may take of this user id, one holds 8 KiB or less.
    """
    try:
        descriptor = os.memfd_create("data", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.memfd_create("data")  # Linux before 6.3
    try:
        with os.fdopen(os.dup(descriptor), "wb") as handle:
            handle.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


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
