"""What the processes below one process are doing, read from ``/proc``."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_ENDED = "ZX"  # states in /proc/PID/stat
_PATIENCE_SECONDS = 5.0


def _children_from_kernel(pid: int) -> list[int]:
    """Direct children of all threads of ``pid``; needs ``CONFIG_PROC_CHILDREN``."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _stat(place: str) -> tuple[int, str, int]:
    """Parent, state and number of threads of a process or thread; ``(-1, "X", 0)`` when it is gone."""
    with suppress(OSError, ValueError, IndexError):
        # The command name is in brackets and may hold anything: cut after the last one.
        fields = Path(f"/proc/{place}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[1]), fields[0], int(fields[17])
    return -1, "X", 0


def _is_alive(pid: int) -> bool:
    """A process lives on in its other threads when its first one, which gives it its state, has ended."""
    _, state, num_threads = _stat(str(pid))
    return state not in _ENDED or num_threads > 1


def speakers(pids: Iterable[int]) -> list[int]:
    """One living thread of each process that lives: what ``/proc`` tells of it holds for the process.

    The first thread, which gives the process its state, unless it has ended before the others: of an ended thread
    ``/proc`` shows neither memory nor open files.
    """
    found: list[int] = []
    for pid in pids:
        _, state, num_threads = _stat(str(pid))
        if state not in _ENDED:
            found.append(pid)
        elif num_threads > 1:
            with suppress(OSError):
                threads = (int(name) for name in os.listdir(f"/proc/{pid}/task"))
                found += [thread for thread in threads if _stat(f"{pid}/task/{thread}")[1] not in _ENDED][:1]
    return found


def _children_of_all() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        children.setdefault(_stat(str(pid))[0], []).append(pid)
    return children


def descendants(root: int) -> list[int]:
    """Process ids below ``root`` (without it), parents before children."""
    kernel_knows = (_PROC / "self/task" / str(os.getpid()) / "children").exists()
    table = {} if kernel_knows else _children_of_all()
    found: list[int] = []
    seen = {root}
    queue = [root]
    while queue:
        pid = queue.pop(0)
        for child in _children_from_kernel(pid) if kernel_knows else table.get(pid, []):
            if child not in seen:
                seen.add(child)
                found.append(child)
                queue.append(child)
    return found


def kill_descendants(root: int) -> bool:
    """Kill everything below ``root`` until nothing alive is left; True when it is so.

    Only complete where orphans come back to ``root`` (it is a subreaper): then no
    descendant can leave the tree. Each pass kills all that it sees, so a fork bomb
    that is bounded in number loses.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        alive = [pid for pid in descendants(root) if _is_alive(pid)]
        if not alive:
            return True
        if time.monotonic() > deadline:
            return False
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def end_jails_naming(start: str, is_meant: Callable[[int, str], bool] = lambda *_: True) -> int:
    """Kill every process that was started as ``bwrap`` with an argument that begins with ``start``, where it is meant.

    Returns how many there were; looks again until there is none, for one may be born while we look, and
    its parent killed before it could tell it to go on.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    num_ended, found = 0, 1
    while found and time.monotonic() <= deadline:
        found = sum(_is_ended(pid, start, is_meant, deadline) for pid in _pids())
        num_ended += found
    return num_ended


def end_jails_without_folder(prefix: str) -> int:
    """The same, for those that name a folder ``prefix…`` that neither we nor they can see any more.

    Such a one was not yet known by its command line when its folder was removed. It is asked with its own
    eyes (``/proc/PID/root``): a jail of another container has its folder there.
    """

    def is_without(pid: int, named: str) -> bool:
        folder = prefix + named.removeprefix(prefix).partition("/")[0]
        if os.path.lexists(folder):  # in the middle of its start a jail itself does not see it
            return False
        return bool(os.listdir(f"/proc/{pid}/root")) and not os.path.lexists(f"/proc/{pid}/root{folder}")

    return end_jails_naming(prefix, is_without)


def _is_ended(pid: int, start: str, is_meant: Callable[[int, str], bool], deadline: float) -> bool:
    """Looked at and signalled through one handle: its number may be another's by then."""
    if _named_by(pid, start) is None:
        return False
    with suppress(OSError):  # gone, or somebody else's
        handle = os.pidfd_open(pid)
        try:
            named = _named_by(pid, start)
            if named is None or not is_meant(pid, named):
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            is_readable(handle, max(0.0, deadline - time.monotonic()))
            return True
        finally:
            os.close(handle)
    return False


def is_readable(descriptor: int, seconds: float) -> bool:
    """Wait until there is something to read; like ``select``, for descriptors of any number."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _named_by(pid: int, start: str) -> str | None:
    """The first argument of a process that begins so, if it was started as ``bwrap``."""
    with suppress(OSError):
        words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        if os.path.basename(words[0]) == "bwrap":
            return next((word for word in words[1:] if word.startswith(start)), None)
    return None
