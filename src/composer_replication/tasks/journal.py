"""What became of each candidate, so that an interrupted build goes on where it stopped."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from composer_replication.errors import InputError
from composer_replication.run_folder import append_jsonl, read_jsonl, rewrite_jsonl
from composer_replication.tasks.blobs import packed_path, read_file, write_file
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.store_records import SUITE_SECONDS, RepositoryRecord

GATES_VERSION = 14
"""Raised when the gates judge otherwise, so that older answers are not taken over."""
_UNDECIDED = ("truth-unknown",)
"""Reasons that say nothing of the candidate; a later build judges it again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One candidate: its task, or the gate that it did not pass. ``key`` covers all that it depends on."""

    key: str
    repository: str
    pin: str
    task_id: str = ""
    reason: str = ""
    detail: str = ""

    @property
    def is_valid(self) -> bool:
        return bool(self.task_id)


def decision_key(
    record: RepositoryRecord, pin: str, *, hidden_share: float, seed: int, with_truth: bool = False
) -> str:
    """A hash of everything that a decision depends on."""
    parts: list[object] = [GATES_VERSION, record.baseline_sha256, pin, hidden_share, seed, with_truth]
    parts += [record.suite_seconds] if record.suite_seconds != SUITE_SECONDS else []
    return sha256_of(json.dumps(parts).encode())[:32]


class Journal:
    """Decisions by key in one JSONL file; appended as they fall, sorted and compressed at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._decisions = {decision.key: decision for decision in _earlier_decisions(path)}
        if path.is_file():  # a crash can leave half a line, to which nothing may be appended
            self._rewrite()

    def find(self, key: str) -> Decision | None:
        return self._decisions.get(key)

    def add(self, decision: Decision) -> None:
        with self._lock:
            self._decisions[decision.key] = decision
            if self._path.is_file():
                append_jsonl(self._path, asdict(decision))
            else:
                self._rewrite()

    def _rewrite(self) -> None:
        rewrite_jsonl(self._path, map(asdict, self._decisions.values()))
        packed_path(self._path).unlink(missing_ok=True)

    def keep(self, decisions: Iterable[Decision]) -> None:
        """Replace the whole file by these decisions, compressed, in an order that does not depend on time."""
        rows = sorted(map(asdict, decisions), key=lambda row: (row["repository"], row["pin"]))
        write_file(self._path, "".join(f"{json.dumps(row, sort_keys=True)}\n" for row in rows).encode())


def read_journal(path: Path) -> list[dict[str, str]]:
    """The rows of a journal, of a build that goes on or of a finished one; where a crash left both, of the first.

    Raises:
        InputError: a line before the last is not JSON (CR0401).
        ValueError, OSError: the compressed form cannot be read.
    """
    packed = packed_path(path)
    if path.is_file() or not packed.is_file():
        return read_jsonl(path)
    return [json.loads(line) for line in read_file(packed).splitlines()]


def _earlier_decisions(path: Path) -> list[Decision]:
    """What can be read of an earlier build; candidates whose decision is lost are judged again."""
    try:
        found = [Decision(**row) for row in read_journal(path)]
    except (InputError, ValueError, TypeError, RecursionError):
        return []
    return [decision for decision in found if decision.reason not in _UNDECIDED]
