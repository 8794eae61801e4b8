"""Run one jailed process to its end: feed it, drain it, watch it, kill its whole tree.

Each backend starts a process and says how its tree is killed; everything else that
``Sandbox.exec`` promises happens here, in the caller's thread. Output is drained for
as long as the process lives and only the first ``output_bytes`` of each stream are
kept, so that neither a full pipe nor a gigabyte of output can hurt.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from pathlib import Path
from typing import IO, Protocol

from composer_replication.errors import SandboxFailure
from composer_replication.records import Limits
from composer_replication.sandbox import folders, process_memory
from composer_replication.sandbox.folders import MemoryFolder
from composer_replication.sandbox.process_tree import descendants, is_readable, speakers

_CHUNK_BYTES = 1 << 16  # what a pipe holds
_WATCH_SECONDS = 0.05
_LONGEST_WATCH_SECONDS = 1.0
_THREADS_A_PROCESS = 4  # on average; where the kernel counts, threads count as processes
_ENDED_A_PROCESS = 4  # of all that are listed, those that have ended included
_LOOKS_UNTIL_HIDING, _SECONDS_UNTIL_HIDING = 5, 2.0  # whoever hands a file over has it received sooner
_TEMPORARY_FOLDERS = (Path("/tmp"), Path("/var/tmp"))  # what a jail calls folders of ours
_WATCH_SHARE = 10  # a look may cost at most a tenth of the time
_interruptions: list[object] = []  # one for each that is going on: they may overlap, and lie in one another


@contextmanager
def runs_interrupted() -> Iterator[None]:
    """Inside, every run of this process, in any thread, is killed within a second or so.

    It raises ``SandboxFailure`` (CR0302) and so never becomes a result. For whoever has to
    wait for threads that run jails, after an interruption.
    """
    one = object()
    _interruptions.append(one)
    try:
        yield
    finally:
        _interruptions.remove(one)


def is_interrupted() -> bool:
    """Whether runs are to end; for a run that waits for something else than a process."""
    return bool(_interruptions)


class Supervised(Protocol):
    """A started process: a ``subprocess.Popen`` with pipes, or a command of a warm jail."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    pid: int
    """Everything below this process is the run's."""

    def wait(self) -> int:
        """Its exit code, -N for signal N; asked once it is dead."""
        ...


class Verdict(Enum):
    """Why we ended the run; ``ENDED`` when it ended by itself."""

    ENDED = "ended"
    TIMED_OUT = "timed out"
    OVER_MEMORY = "its processes together used more memory than the limit"
    OVER_DISK = "it wrote more to disk than the limit"
    HIDES_FILES = "it keeps open or mapped files where no limit counts them"
    OVER_PROCESSES = "it ran more processes than the limit"


@dataclass(slots=True)
class Watched:
    """What a run may use and where it may write; ``baseline_bytes`` were there before.

    Folders in ``closed`` cannot be written into and are not measured. What lies in ``memory`` is memory, and
    disk too.
    """

    limits: Limits
    folders: tuple[Path, ...]
    baseline_bytes: int
    num_own_processes: int = 0
    closed: AbstractSet[str] = frozenset()
    memory: MemoryFolder | None = None
    _hiding: list[float] = field(default_factory=list)
    """When files were hidden, in the last looks in a row."""

    def disk_is_exceeded(self, unlinked_bytes: int = 0, deadline: float = inf) -> bool:
        """Whether more than the limit was written; not yet known to be so when ``deadline`` came first."""
        most = self.baseline_bytes + self.limits.disk_bytes
        try:
            used = folders.folder_bytes(self.folders, self.closed, enough_bytes=most, deadline=deadline)
        except folders.UnmeasurableError:
            return True
        in_memory = 0 if self.memory is None else self.memory.used_bytes()
        return used + unlinked_bytes + in_memory > most

    def are_hiding(self, *, are_hidden: bool) -> bool:
        """Whether files have been where no limit counts them in the last looks, given what this one saw."""
        self._hiding = [*self._hiding, time.monotonic()] if are_hidden else []
        if len(self._hiding) < _LOOKS_UNTIL_HIDING:
            return False
        return self._hiding[-1] - self._hiding[0] >= _SECONDS_UNTIL_HIDING

    def look(self, root: int, deadline: float = inf) -> Verdict:
        """Which limit the tree below ``root`` exceeds now; a look ends soon after ``deadline``."""
        pids = descendants(root)
        most = self.limits.num_processes + self.num_own_processes
        own, theirs = speakers(pids[: self.num_own_processes]), speakers(pids[self.num_own_processes :])
        threads = [*own, *theirs]
        # An ended process that nobody has waited for is only a number; without a process namespace they are the machine's.
        are_too_many = len(threads) > most or len(pids) > _ENDED_A_PROCESS * most
        if are_too_many or process_memory.num_threads(threads) > _THREADS_A_PROCESS * most:
            return Verdict.OVER_PROCESSES
        room, places = self.limits.memory_bytes, (*self.folders, *_TEMPORARY_FOLDERS)
        try:  # to hold what is too long to read costs the kernel as much as to tell of it
            mappings = process_memory.Mappings.of(threads, places, enough_bytes=room, deadline=deadline)
        except process_memory.MapsTooLongError:
            return Verdict.OVER_MEMORY
        room -= 0 if self.memory is None else self.memory.used_bytes()  # what is mapped of it counts twice
        mapped = process_memory.memory_bytes(threads, mappings)
        buffers = process_memory.socket_memory(theirs, room_bytes=room - mapped, deadline=deadline)
        if mapped + buffers.num_bytes > room:
            exact = process_memory.memory_bytes(threads, mappings, is_exact=True, deadline=deadline)
            if exact + buffers.num_bytes > room and time.monotonic() <= deadline:
                return Verdict.OVER_MEMORY
        folders.require_room(self.folders, folders.LEAST_BYTES)
        device = None if self.memory is None else self.memory.device
        found = process_memory.unlinked_files(threads, mappings, counted_device=device, deadline=deadline)
        is_all_told = buffers.is_whole and found.is_whole and not process_memory.hides_descriptors(theirs)
        if self.are_hiding(are_hidden=not is_all_told):
            return Verdict.HIDES_FILES
        return Verdict.OVER_DISK if self.disk_is_exceeded(found.num_bytes, deadline) else Verdict.ENDED


@dataclass(slots=True)
class Stream:
    """One output stream, of which only the first ``keep_bytes`` are kept."""

    source: IO[bytes]
    keep_bytes: int
    kept: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    at_end: bool = False

    def drain(self) -> bool:
        """Take what is there; True when something was read."""
        try:
            chunk = os.read(self.source.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self.at_end = not chunk
        room = self.keep_bytes - len(self.kept)
        self.kept += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room
        return not self.at_end


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended; ``exit_code`` is 128 + N for a process that signal N killed."""

    verdict: Verdict
    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    seconds: float


class _Run:
    """The state of one supervised process."""

    def __init__(
        self, process: Supervised, stdin: bytes, watched: Watched, keep_bytes: int, end_descriptor: int | None
    ) -> None:
        assert process.stdout is not None and process.stderr is not None
        self.process = process
        self.watched = watched
        self.stdin = process.stdin
        self.to_send = memoryview(stdin)
        self.streams = [Stream(process.stdout, keep_bytes), Stream(process.stderr, keep_bytes)]
        self.selector = selectors.PollSelector()  # for four descriptors: cheaper than epoll
        self.end = os.pidfd_open(process.pid) if end_descriptor is None else end_descriptor
        self.owns_end = end_descriptor is None
        self.selector.register(self.end, selectors.EVENT_READ, None)
        for stream in self.streams:
            os.set_blocking(stream.source.fileno(), False)
            self.selector.register(stream.source, selectors.EVENT_READ, stream)
        if self.stdin is not None and stdin:
            os.set_blocking(self.stdin.fileno(), False)
            self.selector.register(self.stdin, selectors.EVENT_WRITE, self)
        elif self.stdin is not None:
            self.stdin.close()

    def wait(self, deadline: float) -> Verdict:
        next_look = time.monotonic() + _WATCH_SECONDS
        while True:
            pause = max(0.0, min(deadline, next_look) - time.monotonic())
            for key, _ in self.selector.select(pause):
                if key.data is None:
                    return Verdict.ENDED
                if key.data is self:
                    self._send()
                elif not key.data.drain() and key.data.at_end:
                    self.selector.unregister(key.fileobj)
            if is_interrupted():
                raise SandboxFailure("CR0302", "the run was killed because the program was interrupted.")
            now = time.monotonic()
            if now >= deadline:
                return Verdict.TIMED_OUT
            if now >= next_look:
                verdict = self.watched.look(self.process.pid, deadline)
                if verdict is not Verdict.ENDED:
                    return verdict
                cost = time.monotonic() - now
                pause = min(max(_WATCH_SECONDS, _WATCH_SHARE * cost), _LONGEST_WATCH_SECONDS)
                next_look = time.monotonic() + pause

    def _send(self) -> None:
        assert self.stdin is not None
        try:
            self.to_send = self.to_send[os.write(self.stdin.fileno(), self.to_send[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it does not want to read: its own affair
            self.to_send = self.to_send[:0]
        if not self.to_send:
            self.selector.unregister(self.stdin)
            self.stdin.close()

    def close(self) -> None:
        self.selector.close()
        if self.owns_end:
            os.close(self.end)
        for stream in self.streams:
            stream.source.close()
        if self.stdin is not None:
            with suppress(OSError):
                self.stdin.close()


def read_until(marker: bytes, descriptor: int, deadline: float, *, interrupted_too: bool = False) -> bytes:
    """What comes from ``descriptor`` up to and with ``marker``, after which its writer waits for us.

    Less when it is at its end, when ``deadline`` (of ``time.monotonic``) is over, or inside ``runs_interrupted`` (unless
    ``interrupted_too``): whoever goes on with it finds out which.
    """
    found = b""
    while marker not in found and (interrupted_too or not is_interrupted()):
        pause = min(deadline - time.monotonic(), _WATCH_SECONDS)
        if pause <= 0:
            break
        if is_readable(descriptor, pause):
            chunk = os.read(descriptor, _CHUNK_BYTES)
            if not chunk:
                break
            found += chunk
    return found


def supervise(
    process: Supervised,
    kill_tree: Callable[[], None],
    *,
    stdin: bytes,
    timeout_seconds: float,
    watched: Watched,
    extra_bytes: int = 0,
    early_stderr: bytes = b"",
    end_descriptor: int | None = None,
) -> Ended:
    """Wait for ``process`` and leave nothing of its tree alive, whatever happens.

    It has pipes on both output streams, and on its input where ``stdin`` is not empty. ``kill_tree`` kills and reaps all,
    ``process`` included, and may be called once it is dead. ``extra_bytes`` is room in each stream for our own marker,
    ``early_stderr`` what ``read_until`` has taken already, kept besides ``output_bytes``. ``end_descriptor`` becomes
    readable when it has ended; by default we look at the process itself.
    """
    started = time.monotonic()
    try:
        run = _Run(process, stdin, watched, watched.limits.output_bytes + extra_bytes, end_descriptor)
    except BaseException:
        kill_tree()
        raise
    run.streams[1].kept += early_stderr
    run.streams[1].keep_bytes += len(early_stderr)
    try:
        try:
            verdict = run.wait(started + timeout_seconds)
        finally:
            kill_tree()
        for stream in run.streams:  # all writers are dead, so what is there now is all there is
            while not stream.at_end and stream.drain():
                pass
    finally:
        run.close()
    if verdict is Verdict.ENDED and watched.disk_is_exceeded():
        verdict = Verdict.OVER_DISK
    if verdict is Verdict.ENDED:
        folders.require_room(watched.folders, folders.LEAST_BYTES)
    code = process.wait()
    return Ended(
        verdict=verdict,
        exit_code=(128 - code if code < 0 else code) if verdict is Verdict.ENDED else 137,
        stdout=bytes(run.streams[0].kept),
        stderr=bytes(run.streams[1].kept),
        truncated=any(stream.truncated for stream in run.streams),
        seconds=time.monotonic() - started,
    )


@contextmanager
def interruptible_pool(num_threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """At least one thread; after an error nothing new begins, and a Ctrl-C kills what runs in jails too."""
    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix=name) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            with runs_interrupted():
                pool.shutdown(cancel_futures=True)
            raise
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
