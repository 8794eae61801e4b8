"""What an attempt is, what is known after it, and how families of them are written down."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_replication.records import ExecResult, Limits

if TYPE_CHECKING:
    from benchmarks.escapes.drives import Stage
    from benchmarks.escapes.scene import Scene
    from benchmarks.escapes.watch import Sample

MIB = 1 << 20
LIMITS = Limits(
    memory_bytes=192 * MIB, num_processes=24, disk_bytes=16 * MIB, output_bytes=MIB, num_open_files=64
)
"""Small, so that a bomb that is not stopped does no harm: it stops by itself at a few times these."""

Judge = Callable[["Scene", "Outcome"], str]
"""What was seen outside that shows a success; empty when there is nothing to see."""
Drive = Callable[["Stage"], None]
"""How the sandbox is used around the attempt: which commands, what the parent does meanwhile or afterwards."""


@dataclass(slots=True)
class Outcome:
    """What is known outside after an attempt."""

    results: list[ExecResult] = field(default_factory=list)
    said: bytearray = field(default_factory=bytearray)
    """What else came out of the jail: files that the parent read, the text of the command line."""
    in_tree: bytes = b""
    """Contents of the tree's own files at the end, links unfollowed."""
    broken: list[str] = field(default_factory=list)
    """Failures of the jail itself."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What a drive saw."""
    samples: list[Sample] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def text(self) -> bytes:
        """Everything that came out."""
        streams = "".join(result.stdout + result.stderr for result in self.results)
        return streams.encode(errors="replace") + bytes(self.said) + self.in_tree


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt.

    Args:
        family: which kind it is of.
        name: unique in its family.
        script: the body of a Python function; the names of ``inside`` are at hand.
        judge: decides from outside.
        drive: how the sandbox is used; None: one command.
        not_without_jail: why it is not run without a jail; empty when it is.
        timeout_seconds: of the command.
        limits: of the sandbox.
        is_watched: look at its processes from outside while it runs.
        has_victim: a process to attack is started.
        has_way_out: a socket and a named pipe lie in the read-only folder. A jail that refuses to open holds.
        only_for: ``root`` or ``user`` where it says nothing for the other; empty for both.
        is_about_us: it attacks the command line or a function of ours, which is the same for every backend.
    """

    family: str
    name: str
    script: str
    judge: Judge
    drive: Drive | None = None
    not_without_jail: str = ""
    timeout_seconds: float = 60.0
    limits: Limits = LIMITS
    is_watched: bool = False
    has_victim: bool = False
    has_way_out: bool = False
    only_for: str = ""
    is_about_us: bool = False

    @property
    def full_name(self) -> str:
        """Family and name."""
        return f"{self.family}: {self.name}"

    @property
    def is_for_us(self) -> bool:
        """Whether it says something for the user that we are."""
        return self.only_for in {"", "root" if os.geteuid() == 0 else "user"}


def family(name: str, rows: Iterable[tuple[Any, ...]], **options: Any) -> list[Attempt]:
    """Attempts of one family; a row is name, script, judge, and perhaps a dictionary of further fields."""
    found = []
    for row in rows:
        title, script, judge, *more = row
        fields = {**options, **(more[0] if more else {})}
        found.append(Attempt(name, title, script.strip("\n"), judge, **fields))
    return found


def any_of(*judges: Judge) -> Judge:
    """A success for one of them is a success."""

    def judge(scene: Scene, outcome: Outcome) -> str:
        return "; ".join(said for said in (each(scene, outcome) for each in judges) if said)

    return judge


def all_attempts() -> Sequence[Attempt]:
    """Every attempt, family by family."""
    from benchmarks.escapes import (
        bombs,
        host_files,
        kernel,
        later_lives,
        network,
        outside_writes,
        parent_races,
        proc_tricks,
        processes,
        terminal,
    )

    modules = (
        network, host_files, outside_writes, bombs, processes, proc_tricks, kernel, parent_races,
        later_lives, terminal,
    )  # fmt: skip
    return [attempt for module in modules for attempt in module.ATTEMPTS]
