"""What is alive or left in a jail besides its files: looked at, not assumed.

A mark is taken before the first command. Later the same places are read again, by the
first process of the jail for what only its namespaces show and from outside for the rest;
every difference is a survivor with a name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from composer_replication.sandbox.warm_jail import WarmJail

_PATIENCE_SECONDS = 1.0  # the kernel collects sockets that were on their way in other sockets by and by
_PAUSE_SECONDS = 0.01
_TCP_ALIVE = {"01", "02", "03", "0A"}  # established, opening, listening; the others are closing
_TCP_STATE = 3
_UNIX_INODE = 6


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def _below_header(text: str) -> set[str]:
    return {" ".join(row) for row in _rows(text)[1:]}


def _tcp(text: str) -> set[str]:
    rows = [row for row in _rows(text)[1:] if len(row) > _TCP_STATE]
    return {" ".join(row[1:4]) for row in rows if row[_TCP_STATE] in _TCP_ALIVE}


def _tcp_closing(text: str) -> set[str]:
    rows = [row for row in _rows(text)[1:] if len(row) > _TCP_STATE]
    return {" ".join(row[1:4]) for row in rows if row[_TCP_STATE] not in _TCP_ALIVE}


def _datagrams(text: str) -> set[str]:
    return {" ".join(row[1:4]) for row in _rows(text)[1:]}


def _netlink(text: str) -> set[str]:
    return {" ".join(row[1:3]) for row in _rows(text)[1:]}


def _unix(text: str) -> set[str]:
    return {
        " ".join(row[_UNIX_INODE + 1 :]) or f"inode {row[_UNIX_INODE]}"
        for row in _rows(text)[1:]
        if len(row) > _UNIX_INODE
    }


def _processes(text: str) -> set[str]:
    return {name for name in text.split() if name.isdigit()}


def _names(text: str) -> set[str]:
    return set(text.splitlines())


def _variables(text: str) -> set[str]:
    return set(text.split("\0"))


# place inside -> (what a difference there is called, how it is read)
_INSIDE: dict[str, tuple[str, Callable[[str], set[str]]]] = {
    "/proc": ("the process", _processes),
    "/proc/sysvipc/shm": ("System V shared memory", _below_header),
    "/proc/sysvipc/msg": ("a System V message queue", _below_header),
    "/proc/sysvipc/sem": ("a System V semaphore", _below_header),
    "/dev/mqueue": ("the message queue", _names),
    "/proc/net/unix": ("a unix socket", _unix),
    "/proc/net/tcp": ("a TCP socket", _tcp),
    "/proc/net/tcp6": ("a TCP socket", _tcp),
    "/proc/net/udp": ("a UDP socket", _datagrams),
    "/proc/net/udp6": ("a UDP socket", _datagrams),
    "/proc/net/udplite": ("a UDP-Lite socket", _datagrams),
    "/proc/net/udplite6": ("a UDP-Lite socket", _datagrams),
    "/proc/net/icmp": ("an ICMP socket", _datagrams),
    "/proc/net/raw": ("a raw socket", _datagrams),
    "/proc/net/raw6": ("a raw socket", _datagrams),
    "/proc/net/netlink": ("a netlink socket", _netlink),
    "/proc/net/packet": ("a packet socket", _below_header),
    "/proc/self/fd": ("the open descriptor", _names),
    "/proc/self/environ": ("the variable", _variables),
}
_CLOSING = ("/proc/net/tcp", "/proc/net/tcp6")
_COUNTERS = ("/proc/net/dev", "/proc/net/snmp", "/proc/net/netstat", "/proc/net/snmp6")


@dataclass(frozen=True, slots=True)
class JailMark:
    """What a jail holds: by name of a kind, what there is of it.

    ``num_closing`` TCP connections have been closed by all and are still remembered by the kernel. ``counters``
    of the loopback device and of its protocols only grow.
    """

    held: dict[str, frozenset[str]]
    num_closing: int
    counters: tuple[bytes | int, ...]

    def has_traces(self, earlier: JailMark) -> bool:
        """Whether the network tells of an earlier use, though nothing of it is left."""
        return self.num_closing > 0 or self.counters != earlier.counters

    @classmethod
    def of(cls, jail: WarmJail) -> JailMark:
        """Look now; call only while no command runs.

        Raises:
            SandboxFailure: the jail is gone (CR0302).
        """
        found: dict[str, set[str]] = {}
        num_closing = 0
        seen = jail.look([*_INSIDE, *_COUNTERS])
        counters = tuple(seen.pop(place) for place in _COUNTERS)
        for place, content in seen.items():
            name, read = _INSIDE[place]
            # An errno is held too: a place that cannot be read any more is a difference.
            text = content.decode(errors="replace") if isinstance(content, bytes) else ""
            found.setdefault(name, set()).update(
                read(text) if isinstance(content, bytes) else {f"{place}: {os.strerror(content)}"}
            )
            if place in _CLOSING:
                num_closing += len(_tcp_closing(text))
        found["the process"] |= {f"{pid} outside" for pid in jail.processes()}
        found["the setting of the first process"] = {str(value) for value in settings_of(jail.pid)}
        found["the readiness to be killed"] = {Path(f"/proc/{jail.pid}/oom_score_adj").read_text().strip()}
        return cls({name: frozenset(held) for name, held in found.items()}, num_closing, counters)

    def survivors(self, earlier: JailMark) -> list[str]:
        """What is there and was not, and what was there and is not."""
        found = []
        for name, held in self.held.items():
            before = earlier.held.get(name, frozenset())
            found += [f"{name} {what}".strip()[:200] for what in sorted(held - before)]
            found += [f"the change of {name} {what}".strip()[:200] for what in sorted(before - held)]
        return found


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


def settled(jail: WarmJail, earlier: JailMark) -> tuple[JailMark, list[str]]:
    """Look until nothing is left that was not there, or for a second; the last look and what is left.

    Raises:
        SandboxFailure: the jail is gone (CR0302).
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        now = JailMark.of(jail)
        left = now.survivors(earlier)
        if not left or time.monotonic() > deadline:
            return now, left
        time.sleep(_PAUSE_SECONDS)
