"""What an attempt is, what is known after it, and how the table of them is read."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
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

    @property
    def full_name(self) -> str:
        """Family and name."""
        return f"{self.family}: {self.name}"


@cache
def all_attempts() -> Sequence[Attempt]:
    """Every attempt of ``attempts.toml``, family by family.

    What a family says holds for each of its attempts that says nothing else. ``judge`` and ``drive`` are
    expressions over the functions of ``judges`` and ``drives``; a script that a drive runs besides the
    attempt's own stands beside it as ``second``.
    """
    from benchmarks.escapes import drives, judges

    def attempt(name: str, row: dict[str, Any]) -> Attempt:
        names = {"second": row.pop("second", "")}
        judge = eval(row.pop("judge"), {**vars(judges), **names})  # our own file
        drive = eval(row.pop("drive", "None"), {**vars(drives), **names})
        return Attempt(name, judge=judge, drive=drive, **row)

    families = tomllib.loads(Path(__file__).with_name("attempts.toml").read_text())["family"]
    return [
        attempt(family["name"], {**family["each"], **row}) for family in families for row in family["attempt"]
    ]
