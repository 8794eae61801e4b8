"""What a build was asked for, a candidate to be judged by it, and what was decided."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import product

from composer_replication.tasks.gates import GateFailed, Subject
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.body_cuts import Deletion, Granularity, Removal
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.store_records import SUITE_SECONDS

GATES_VERSION = 18
"""Raised when the gates judge otherwise, so that older answers are not taken over."""


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
    """One deletion to be judged as ``settings`` want it; ``instance`` is what a foreign task set says of it."""

    repository: PreparedRepository
    deletion: Deletion
    settings: Settings
    is_pinned: bool
    instance: Instance | None = None

    @property
    def key(self) -> str:
        """A hash of everything that the decision depends on."""
        asked, record = self.settings, self.repository.record
        parts = [GATES_VERSION, record.baseline_sha256, record.suite_seconds, self.deletion.pin]
        parts += [asked.hidden_share, asked.seed, asked.with_truth]
        parts += [self.instance.digest(self.deletion)] if self.instance else []
        return sha256_of(json.dumps(parts).encode())[:32]

    def decided(self, **said: str) -> Decision:
        """That it is a task (``task_id``), or why it is none (``reason``, ``detail``)."""
        name = self.deletion.pin if self.instance is None else self.instance.instance_id
        return Decision(self.key, self.repository.record.repository, name, **said)


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
