"""What a build was asked for, the candidates that it tries in order, and what was decided about each, so that it can go on."""

from __future__ import annotations

import difflib
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from itertools import product, zip_longest
from pathlib import Path
from typing import TypeVar

from composer_replication.errors import InputError
from composer_replication.run_folder import append_jsonl, read_jsonl, rewrite_jsonl
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.body_cuts import Deletion, Granularity, Removal
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.store_records import SUITE_SECONDS, RepositoryRecord
from composer_replication.tasks.subject import GateFailed, Subject

GATES_VERSION = 18
"""Raised when the gates judge otherwise, so that older answers are not taken over."""
_HOW_TO_NAME = "write PATH::NAME, or PATH::NAME@SIZE/WAY: SIZE one of function, class, module, feature, WAY body or whole."

Item = TypeVar("Item")
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is done now) from the calling thread; a new stretch of work begins with fewer done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a build was asked for.

    Args:
        symbols: for a source, the functions to delete (``path/inside/tree.py::Qualified.name``);
            a source without an entry gives all its candidates, in an order drawn by ``seed``.
        granularities: what is deleted; the sizes take turns.
        removals: how much of it; see ``body_cuts``.
        with_truth: record what the deleted functions do, as further hidden tests (``twin``), refuse
            tasks that have neither these nor hidden tests, and measure how strong both are.
        max_tasks: stop after so many tasks.
        seed: draws candidates and hidden tests.
        hidden_share: share of a task's test functions that are held back, in [0, 1).
        suite_seconds: how long by the clock one run of a repository's whole suite may take; above 0, at most a day.
    """

    symbols: Mapping[str, Sequence[str]] = field(default_factory=dict)
    granularities: Sequence[Granularity] = ("function",)
    removals: Sequence[Removal] = ("body",)
    with_truth: bool = False
    max_tasks: int | None = None
    seed: int = 0
    hidden_share: float = 0.5
    suite_seconds: float = SUITE_SECONDS

    def decision_key(self, record: RepositoryRecord, pin: str) -> str:
        """A hash of everything that the decision about a candidate depends on."""
        parts = [GATES_VERSION, record.baseline_sha256, pin, self.hidden_share, self.seed, self.with_truth]
        parts += [record.suite_seconds] if record.suite_seconds != SUITE_SECONDS else []
        return sha256_of(json.dumps(parts).encode())[:32]

    def sizes(self, source: str) -> tuple[tuple[str, str], ...]:
        """The (granularity, removal) pairs to plan for a source: those that its pins name, or without pins all that are asked for."""
        pins = self.symbols.get(source)
        if not pins:
            return tuple(product(self.granularities, self.removals))
        named = (pin.rpartition("@")[2].split("/") if "@" in pin else ("function", "body") for pin in pins)
        return tuple(dict.fromkeys((size[0], size[-1]) for size in named))


# --- A candidate, and what a foreign task set says of one that it brings along.


@dataclass(frozen=True, slots=True)
class Instance:
    """One row of a SWE-bench set; ``repo`` is ``OWNER/NAME`` or ``NAME``."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    fail_to_pass: frozenset[str]
    pass_to_pass: frozenset[str]
    problem_statement: str

    def check(self, subject: Subject) -> None:
        """The tests that it says fail must all fail, those that it says pass must not."""
        failing, detail = set(subject.own_tests), ""
        if broken := self.pass_to_pass & failing:  # which ones stays unsaid: they may be hidden
            detail = f"{len(broken)} tests should pass without the patch and fail"
        if passing := sorted(self.fail_to_pass - failing):
            detail = f"{len(passing)} tests should fail without the patch and do not ({passing[0]})"
        if detail:
            raise GateFailed("other-tests-fail", detail)

    def digest(self, deletion: Deletion) -> str:
        """A hash of everything in it, and in the deletion that it asks for, that a decision depends on."""
        tests = [sorted(self.fail_to_pass), sorted(self.pass_to_pass)]
        stated = [*tests, self.problem_statement, self.instance_id]
        edits = [astuple(edit) for edit in deletion.edits]
        return sha256_of(json.dumps([edits, deletion.removed_files, stated]).encode())


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deletion to be judged; ``key`` covers all that its decision depends on.

    ``instance`` is what a foreign task set says of it, where it comes from one.
    """

    repository: PreparedRepository
    deletion: Deletion
    is_pinned: bool
    key: str
    instance: Instance | None = None

    def decided(self, **said: str) -> Decision:
        """That it is a task (``task_id``), or why it is none (``reason``, ``detail``)."""
        name = self.deletion.pin if self.instance is None else self.instance.instance_id
        return Decision(self.key, self.repository.record.repository, name, **said)


# --- In which order the candidates of a repository are tried.


def drawn(repository: PreparedRepository, seed: int) -> list[Deletion]:
    """All candidates in an order drawn by the seed; sizes and ways take turns.

    Of features those come first that delete functions in several files: nothing smaller asks for that, and they
    are rare.
    """

    def rank(deletion: Deletion) -> tuple[bool, str]:
        is_in_one_file = len({cut.path for cut in deletion.bodies}) < 2
        drawn_place = hashlib.sha256(f"{seed}/{repository.slug}/{deletion.pin}".encode()).hexdigest()
        return deletion.granularity == "feature" and is_in_one_file, drawn_place

    of_size: dict[tuple[str, str], list[Deletion]] = {}
    for one in sorted(repository.deletions, key=rank):
        of_size.setdefault((one.granularity, one.removal), []).append(one)
    return in_turn(of_size[key] for key in sorted(of_size))


def in_turn(columns: Iterable[Sequence[Item]]) -> list[Item]:
    """The first of each column, then the second of each, and so on."""
    return [item for row in zip_longest(*columns) for item in row if item is not None]


def pinned(repository: PreparedRepository, pins: Sequence[str]) -> list[Deletion]:
    """The candidates that pins name, in their order."""
    chosen = []
    for pin in pins:
        deletion = repository.by_pin(pin)
        if deletion is None:
            near = difflib.get_close_matches(pin, [d.pin for d in repository.deletions], n=1, cutoff=0.0)
            raise InputError(
                "CR0402",
                f"{repository.record.repository} has no {pin!r} that can be deleted.",
                where=pin,
                fix=f"the nearest is {near[0]}." if near else _HOW_TO_NAME,
            )
        chosen.append(deletion)
    return chosen


# --- What was decided about each candidate, kept so that a build that was cut off goes on.


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


class Journal:
    """Decisions by key in one JSONL file; appended as they fall, sorted at the end.

    Where a line cannot be read, all candidates are judged again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._decisions: dict[str, Decision] = {}
        with suppress(InputError, ValueError, TypeError, RecursionError):
            self._decisions = {one.key: one for one in (Decision(**row) for row in read_jsonl(path))}
        if path.is_file():  # a crash can leave half a line, to which nothing may be appended
            self.keep(self._decisions.values())

    def find(self, key: str) -> Decision | None:
        return self._decisions.get(key)

    def add(self, decision: Decision) -> None:
        with self._lock:
            self._decisions[decision.key] = decision
            append_jsonl(self._path, asdict(decision))

    def keep(self, decisions: Iterable[Decision]) -> None:
        """Replace the whole file by these decisions, in an order that does not depend on time."""
        ordered = sorted(decisions, key=lambda one: (one.repository, one.pin, one.key))
        rewrite_jsonl(self._path, map(asdict, ordered))
