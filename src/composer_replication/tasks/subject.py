"""What the gates judge: a deletion, its tests and how they are parted, and every tree that follows from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_replication.records import Edit, Task, TestSplit
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.environment import Refused
from composer_replication.tasks.patches import make_patch
from composer_replication.tasks.planning.body_cuts import MARKER_STATEMENT
from composer_replication.tasks.planning.edits import (
    Changes,
    edited_files,
    line_edits,
    shifted_line,
    view_files,
)
from composer_replication.tasks.repository import make_bench
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.test_functions import (
    Place,
    deleted_texts,
    deleted_words,
    hold_back,
    places_to_show,
)


class GateFailed(Refused):
    """A candidate that is no task."""


_NOT_PARTED = TestSplit((), (), ())


@dataclass(frozen=True, slots=True)
class Subject:
    """A deletion and the tests that part it from the original.

    ``stub_edits`` are the cuts of all functions inside the deleted code, in original offsets.
    """

    changes: Changes
    stub_edits: tuple[Edit, ...]
    is_whole: bool
    tests: TestSplit = _NOT_PARTED
    withheld: tuple[str, ...] = ()

    @property
    def own_tests(self) -> tuple[str, ...]:
        """All tests that must fail without the code, and pass with it."""
        return tuple(sorted({*self.tests.visible, *self.tests.hidden}))

    @property
    def sides(self) -> dict[str, tuple[str, ...]]:
        """The sets of tests of which each must tell the code from a stub; without the empty ones."""
        sides = {"visible": self.tests.visible, "paid": self.tests.paid, "hidden": self.tests.hidden}
        return {kind: tests for kind, tests in sides.items() if tests}

    def broken(self, original: Mapping[str, bytes], view: str) -> dict[str, bytes]:
        """A view of the tree with the code taken out."""
        return view_files(original, self.changes, view)

    def golden(self, original: Mapping[str, bytes], view: str) -> dict[str, bytes]:
        """The same view with the code back."""
        restored = {path: original[path] for path in self.changes.source_files}
        return {**self.broken(original, view), **restored}

    def golden_patch(self, original: Mapping[str, bytes]) -> str:
        """The unified diff that puts the code back; the files that lost code are enough of ``original``."""
        restored = {path: original[path] for path in self.changes.source_files}
        edits = tuple(edit for edit in self.changes.edits_of_tests("rollout") if edit.path in restored)
        broken = view_files(restored, replace(self.changes, shown_edits=edits), "rollout")
        return make_patch(broken, restored)

    def stubbed(self, original: Mapping[str, bytes], view: str, expression: str) -> dict[str, bytes]:
        """The same view with the code back, and every function of it only returning ``expression``."""
        stubs = [
            Edit(edit.path, edit.start, edit.end, edit.text.replace(MARKER_STATEMENT, f"return {expression}"))
            for edit in self.stub_edits
        ]
        return {**self.golden(original, view), **edited_files(original, stubs)}

    def golden_bodies(self, original: Mapping[str, bytes]) -> list[str]:
        """The deleted function bodies; where there are none, the deleted spans."""
        edits = self.stub_edits or self.changes.edits
        return [original[edit.path].decode()[edit.start : edit.end] for edit in edits]


def subject_of(store: TaskStore, task: Task) -> Subject:
    """A stored task as the gates see it."""
    record, secret = store.record(task.task_id), store.secret(task.task_id)
    return Subject(
        changes=record.changes,
        stub_edits=record.stub_edits or record.edits,
        is_whole=record.removal == "whole",
        tests=task.tests,
        withheld=secret.withheld,
    )


def golden_patch(store: TaskStore, task: Task) -> str:
    """The unified diff that puts the code back. Never to be shown to a policy."""
    subject, record = subject_of(store, task), store.record(task.task_id)
    return subject.golden_patch({path: store.original(record, path) for path in subject.changes.source_files})


def bench_of(store: TaskStore, task: Task) -> Bench:
    """Where a stored task is tried out, with the time that its build gave to a whole suite."""
    slug = store.record(task.task_id).repository_record
    record, files = store.repository(slug), store.repository_files(slug)
    return make_bench(files, store.environment(task), store.backend, record.suite_seconds, record.left_out)


# --- Which of a deletion's failing tests a solver sees, which are paid but not shown, and which are hidden.

PAID_SHARE = 1 / 3
"""Of the visible test functions of a task, those that are paid but not shown."""
MIN_VISIBLE_FUNCTIONS = 3
"""With fewer of them all are shown: a policy needs tests to work with."""


class Parting:
    """Draws apart the tests of one deletion, always the same for a seed and a salt; another salt gives another draw.

    What would not be fair or not be hidden (``places_to_show``) stays with the others, and others are drawn in its place.
    ``given`` are names that a rollout is told besides its tree.
    """

    def __init__(
        self,
        unsplit: Subject,
        repository: RepositoryRecord,
        original: Mapping[str, bytes],
        *,
        seed: int,
        given: Collection[str],
    ) -> None:
        self.unsplit, self.repository, self.original = unsplit, repository, original
        self._seed, self._given = seed, given
        self._words = deleted_words(unsplit.changes, original)
        self._texts = deleted_texts(unsplit.changes, original)

    def hide(self, failing: frozenset[str], *, share: float, salt: str) -> Subject:
        """Part the failing tests into visible and hidden ones, and the trees with them; all visible ones are shown."""
        hidden, changes = self._draw(
            "visible_edits", self.unsplit.changes, self._places_of(failing), share=share, salt=salt
        )
        out = {test for test, place in self.repository.places.items() if place in hidden}
        tests = TestSplit(tuple(sorted(failing - out)), tuple(sorted(failing & out)), ())
        return replace(self.unsplit, changes=changes, tests=tests, withheld=tuple(sorted(out - failing)))

    def pay(self, subject: Subject, *, salt: str) -> Subject:
        """Take some visible test functions out of what a rollout sees: the reward counts them all the same.

        The subject as it is where fewer than ``MIN_VISIBLE_FUNCTIONS`` are visible, where none can go, or where a
        hidden test would need what only they tell.
        """
        tests = subject.tests
        visible, hidden = self._places_of(tests.visible), self._places_of(tests.hidden)
        if len(visible) < MIN_VISIBLE_FUNCTIONS:
            return subject
        paid, changes = self._draw(
            "shown_edits", subject.changes, visible, share=PAID_SHARE, salt=salt, gone=hidden
        )
        if not paid or self._to_show(hidden, changes):
            return subject
        own = tuple(test for test in tests.visible if self.repository.places[test] in paid)
        return replace(subject, changes=changes, tests=replace(tests, paid=own))

    def _places_of(self, tests: Iterable[str]) -> frozenset[Place]:
        return frozenset(self.repository.places[test] for test in tests)

    def _to_show(self, places: Collection[Place], changes: Changes) -> frozenset[Place]:
        """Which of some functions that rollouts do not see after these changes must be shown."""
        shown = view_files(self.original, changes, "rollout")
        return places_to_show(places, self.original, shown, self._words, self._given, texts=self._texts)

    def _draw(
        self,
        field: str,
        changes: Changes,
        places: frozenset[Place],
        *,
        share: float,
        salt: str,
        gone: frozenset[Place] = frozenset(),
    ) -> tuple[frozenset[Place], Changes]:
        """A share of the places, and the changes whose edits of that field are without them; ``gone`` are out already.

        All parametrisations of a function stay on one side. At least one function is taken and never all, if they can
        be taken out of their file cleanly; a single one stays.
        """
        moves, num_places = changes.test_edits, len(places)
        at_most = (
            max(1, min(num_places - 1, round(num_places * share))) if num_places > 1 and share > 0 else 0
        )
        paths = {path for path, _, _ in places | gone} & set(self.original)
        texts = {path: self.original[path].decode("utf-8", "replace") for path in paths}
        moved = {path: data.decode() for path, data in edited_files(self.original, moves).items()}
        now = {place: self._moved(place, moves) for place in places | gone}
        back = {there: place for place, there in now.items()}

        def rank(there: Place) -> str:
            path, line, name = there
            return sha256_of(f"{self._seed}/{salt}/{path}/{name}/{line}".encode())

        in_order = sorted((now[place] for place in places), key=rank)
        shown: frozenset[Place] = frozenset()
        while True:
            held_back, files = hold_back(
                [there for there in in_order if back[there] not in shown],
                {path: moved.get(path, text) for path, text in texts.items()},
                at_most,
                gone={now[place] for place in gone},
            )
            untouched = (edit for edit in changes.visible_edits if edit.path not in files)
            shorter = (edit for path in sorted(files) for edit in line_edits(path, texts[path], files[path]))
            drawn = frozenset(back[there] for there in held_back)
            new: dict[str, Any] = {field: (*untouched, *shorter)}
            found: Changes = replace(changes, **new)
            more = self._to_show(drawn, found)
            if not more:
                return drawn, found
            shown |= more

    def _moved(self, place: Place, edits: Iterable[Edit]) -> Place:
        """Where a test function stands once the imports of its file are moved."""
        path, line, name = place
        own = [edit for edit in edits if edit.path == path]
        return (path, shifted_line(self.original[path].decode(), own, line), name) if own else place
