"""Findings, a JSON line each, in a file that is only added to: a run that was cut short goes on with it. And their table.

A journal is a descriptor, open for reading and adding: an ordinary user is handed it by root, and could not open the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import composer_replication

if TYPE_CHECKING:
    from benchmarks.escapes.attempt import Attempt

ESCAPED, HELD, NOT_RUN, UNTRIED = "ESCAPED", "held", "not run", "COULD NOT BE TRIED"
WITHOUT_JAIL = ("none", "control")
Row = dict[str, Any]


@cache
def sources() -> str:
    """Twelve digits that change with the code of the jails or of the attempts."""
    digest = hashlib.sha256()
    package = Path(composer_replication.__file__).parent
    for folder in (package / "sandbox", Path(__file__).parent):
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.toml")]):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def open_journal(path: Path) -> int:
    """Open it, or make it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)


def add(journal: int, row: Row) -> None:
    """Keep one finding. The line feed comes first, too: a line that a kill has cut stays alone."""
    os.write(journal, f"\n{json.dumps({**row, 'sources': sources()})}\n".encode())


def rows_of(journal: int) -> list[Row]:
    """What is there, oldest first; lines that were cut are left out."""
    found = []
    with open(journal, "rb", closefd=False) as file:
        file.seek(0)
        for line in filter(None, file.read().splitlines()):
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def done(journal: int, backend: str, user: str) -> set[tuple[str, str]]:
    """Family and name of what needs not be tried again: found by today's code, and not for want of time."""
    return {
        (row["family"], row["name"])
        for row in rows_of(journal)
        if (row["backend"], row["user"], row["sources"]) == (backend, user, sources())
        and row["state"] != UNTRIED
    }


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last finding about each attempt."""
    return [*{(row["backend"], row["user"], row["family"], row["name"]): row for row in rows}.values()]


def escaped(rows: Sequence[Row]) -> list[str]:
    """The attempts that succeeded."""
    return [f"{row['family']}: {row['name']}" for row in rows if row["state"] == ESCAPED]


def table_row(backend: str, user: str, rows: Sequence[Row], attempts: Sequence[Attempt]) -> str:
    """A line of the documentation's table: attempts that were tried of those that say something about it, and successes."""
    tried = [row for row in rows if row["state"] in {ESCAPED, HELD}]
    is_jail, names = backend not in WITHOUT_JAIL, escaped(tried)
    num_applicable = sum(
        attempt.only_for in {"", user} and (is_jail or not attempt.not_without_jail) for attempt in attempts
    )
    cells = [backend, "ordinary" if user == "user" else user, f"{len(tried)} of {num_applicable}"]
    successes = f"{len(names)}: {'; '.join(names)}" if names and is_jail else str(len(names))
    return f"| {' | '.join([*cells, str(len({row['family'] for row in tried})), successes])} |"
