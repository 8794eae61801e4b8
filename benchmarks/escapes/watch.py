"""The processes of an attempt, looked at from outside: found by a token in their command line."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Self

_PAUSE_SECONDS = 0.1
_NAMESPACES = ("user", "mnt", "net", "pid_for_children", "ipc", "uts", "cgroup", "time_for_children")


@dataclass(frozen=True, slots=True)
class Sample:
    """What its processes were at one moment.

    ``memory_bytes`` is anonymous and shared memory, ``shmem_bytes`` that of the whole machine; ``descriptors``
    is the largest number that one process has open, ``kinds`` are the anonymous kinds among them; ``namespaces`` has
    the distinct namespaces of each kind.
    """

    at: float
    num_processes: int
    num_threads: int
    memory_bytes: int
    shmem_bytes: int
    disk_bytes: int
    descriptors: int
    kinds: frozenset[str]
    capabilities: int
    user_ids: frozenset[str]
    groups: frozenset[str]
    namespaces: frozenset[str]


def processes_with(token: str) -> list[int]:
    """Living processes whose command line holds the token, without ourselves and without what only keeps a jail."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                line = Path(f"/proc/{name}/cmdline").read_bytes()
                # ``bwrap`` and ``setpriv`` show the whole command that they start
                is_keeper = os.path.basename(line.split(b"\0", 1)[0]) in {b"bwrap", b"setpriv"}
                if token.encode() in line and not is_keeper and _state(int(name)) not in "ZX":
                    found.append(int(name))
    return found


def _state(pid: int) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return "X"


def kill_survivors(token: str) -> None:
    """End what should not live any more."""
    for pid in processes_with(token):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """By a signal or a tracer."""
    return _state(pid) in "tT"


def system_shmem_bytes() -> int:
    """Shared memory and memory-backed files of the whole machine."""
    _, _, rest = Path("/proc/meminfo").read_text().partition("\nShmem:")
    return int(rest.split()[0]) * 1024 if rest else 0


class Watch:
    """Samples of the processes of a token while it is entered; the size of the folders counts as disk in use."""

    def __init__(self, token: str, folders: tuple[Path, ...]) -> None:
        self._token, self._folders = token, folders
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.samples: list[Sample] = []

    def _watch(self) -> None:
        while not self._end.wait(_PAUSE_SECONDS):
            self.samples.append(self._look())

    def _look(self) -> Sample:
        pids, memory = processes_with(self._token), ("RssAnon", "RssShmem")
        fields = [_status(pid) for pid in pids]
        links = [_links(f"/proc/{pid}/fd") for pid in pids]
        return Sample(
            at=time.monotonic(),
            num_processes=len(pids),
            num_threads=sum(int(field.get("Threads", "0")) for field in fields),
            memory_bytes=1024
            * sum(int(field.get(key, "0").split()[0]) for field in fields for key in memory),
            shmem_bytes=system_shmem_bytes(),
            disk_bytes=sum(_folder_bytes(folder) for folder in self._folders) + _deleted_bytes(pids),
            descriptors=max((len(found) for found in links), default=0),
            kinds=frozenset(
                link for found in links for link in found if "anon_inode" in link or "secretmem" in link
            ),
            capabilities=reduce(or_, (int(field.get("CapEff", "0"), 16) for field in fields), 0),
            user_ids=frozenset(word for field in fields for word in field.get("Uid", "").split()[:3]),
            groups=frozenset(word for field in fields for word in field.get("Groups", "").split()),
            namespaces=frozenset(name for pid in pids for name in _links(f"/proc/{pid}/ns", _NAMESPACES)),
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def _status(pid: int) -> dict[str, str]:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}
    return {}


def _links(folder: str, names: Iterable[str] = ()) -> list[str]:
    """Where links lead: those of a folder of ``/proc``, or these of them."""
    found = []
    with suppress(OSError):
        for name in names or os.listdir(folder):
            with suppress(OSError):
                found.append(os.readlink(f"{folder}/{name}"))
    return found


def _deleted_bytes(pids: list[int]) -> int:
    sizes = {}
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    info = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
                        sizes[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(sizes.values())


def _folder_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
