"""Findings, a JSON line each, in a file that is only added to: a run that was cut short goes on with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import composer_replication
from benchmarks.escapes.table import UNTRIED

_CHUNK_BYTES = 1 << 20

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


class Journal:
    """A file of findings.

    Args:
        descriptor: open for reading and adding. An ordinary user is handed it by root, and could not open the file.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_inheritable(descriptor, False)

    @classmethod
    def at(cls, path: Path) -> Journal:
        """Open it, or make it."""
        return cls(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644))

    def add(self, row: Row) -> None:
        """Keep one finding. The line feed comes first, too: a line that a kill has cut stays alone."""
        os.write(self.descriptor, f"\n{json.dumps({**row, 'sources': sources()})}\n".encode())

    def rows(self) -> list[Row]:
        """What is there, oldest first; lines that were cut are left out."""
        text, at = b"", 0
        while chunk := os.pread(self.descriptor, _CHUNK_BYTES, at):
            text, at = text + chunk, at + len(chunk)
        found = []
        for line in filter(None, text.splitlines()):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def done(self, backend: str, user: str) -> set[tuple[str, str]]:
        """Family and name of what needs not be tried again: found by today's code, and not for want of time."""
        return {
            (row["family"], row["name"])
            for row in self.rows()
            if (row["backend"], row["user"], row["sources"]) == (backend, user, sources())
            and row["state"] != UNTRIED
        }


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last finding about each attempt."""
    found = {(row["backend"], row["user"], row["family"], row["name"]): row for row in rows}
    return list(found.values())
