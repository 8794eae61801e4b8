"""Where a run keeps what (``RunFolder``), and how it is written so that a crash loses nothing.

Standard library only; every JSON file carries ``schema_version``.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_replication.errors import InputError, UsageError

SCHEMA_VERSION = 1
TORN_WRITE = re.compile(r"\..+\.(\d+)\.tmp")
"""The name that ``write_atomic`` gives a file until it is whole: the process's id stands in it."""


class RunFolder:
    """Paths and locked access to one run's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root = root.resolve()
        self.recipe = root / "run.toml"  # as resolved
        self.environment = root / "environment.json"  # versions, seeds, git revision, fingerprints
        self.metrics = root / "metrics.jsonl"  # one line a step
        self.verdicts = root / "verdicts.jsonl"  # one line a guard update
        self.evaluations = root / "evaluations.jsonl"  # scores before they were judged, with [evidence]
        self.checks = root / "checks.jsonl"  # what the trainer's checks said, where one spoke
        self.bad_batches = root / "bad_batches"  # whose loss was not finite
        self.outer_steps = root / "outer_steps.jsonl"  # one line an outer step, where several replicas train
        self.rollouts = root / "rollouts"  # step-000001.jsonl and so on
        self.checkpoints = root / "checkpoints"  # checkpoint-N, whole once its MANIFEST.json is there
        self.model = root / "model"  # trained, with its card, where the run came to its end unhalted
        self.summary = root / "summary.json"  # what the verb printed
        self.report = root / "report.html"  # what a person reads

    @property
    def is_occupied(self) -> bool:
        """Whether anything is in it but the lock and what a killed writer left."""
        return self.root.is_dir() and any(
            path.name != "LOCK" and not TORN_WRITE.fullmatch(path.name) for path in self.root.iterdir()
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one process, with which the lock dies; refused where another one holds it (CR0203)."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "LOCK").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                fix = "wait for it to end, or choose another folder with --out RUN."
                problem = "another run is writing this folder."
                raise UsageError("CR0203", problem, where=str(self.root), fix=fix) from error
            yield


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write under a temporary name, fsync, rename: the file is old or new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as handle:
        handle.write(data.encode() if isinstance(data, str) else data)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with the schema version in it."""
    versioned = {"schema_version": SCHEMA_VERSION, **value}
    write_atomic(path, json.dumps(versioned, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that ``write_json`` wrote; missing, broken or of another version it is refused (CR0401)."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, f"the file cannot be read: {error}.") from error
    if not isinstance(value, dict) or value.get("schema_version") != SCHEMA_VERSION:
        found = value.get("schema_version") if isinstance(value, dict) else None
        raise _unreadable(path, f"schema version {found} is not {SCHEMA_VERSION}.")
    return value


def _unreadable(where: Path | str, problem: str) -> InputError:
    fix = "restore that file from a copy, or begin in a new folder with --out."
    return InputError("CR0401", problem, where=str(where), fix=fix)


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append one line and fsync it; a torn last line is dropped by ``read_jsonl``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        handle.write(json.dumps(row, sort_keys=True, allow_nan=False) + "\n")
        handle.flush()
        os.fsync(handle.fileno())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSONL file; a torn last line (a crash) is left out, another that is no JSON refused (CR0401)."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")  # a JSON string may hold other signs at which str.splitlines cuts
    if not lines[-1]:
        lines.pop()
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise _unreadable(f"{path}:{number}", "a line is not JSON.") from error
    return rows


def rewrite_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a JSONL file as a whole, atomically (used when a resume cuts it back)."""
    write_atomic(path, "".join(json.dumps(row, sort_keys=True, allow_nan=False) + "\n" for row in rows))
