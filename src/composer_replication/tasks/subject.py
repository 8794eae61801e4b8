"""What the gates judge: a deletion, its tests, and every tree that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from composer_replication.records import Edit, Task
from composer_replication.tasks.fair_split import (
    deleted_texts,
    deleted_words,
    names_elsewhere,
    places_to_show,
)
from composer_replication.tasks.patches import make_patch
from composer_replication.tasks.planning.body_cuts import MARKER_STATEMENT
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.planning.edits import edited_files, edited_text, line_edits, shifted_line
from composer_replication.tasks.repository import make_bench
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.test_functions import Place, part_tests
from composer_replication.tasks.views import Changes, view_files


class GateFailed(Exception):
    """A candidate that is no task; ``gate`` is the short name that is counted."""

    def __init__(self, gate: str, detail: str) -> None:
        super().__init__(gate, detail)  # as they came, so that it can be pickled
        self.gate = gate
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.gate}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A deletion and the tests that part it from the original.

    ``stub_edits`` are the cuts of all functions inside the deleted code, in original offsets.
    """

    changes: Changes
    stub_edits: tuple[Edit, ...]
    is_whole: bool
    visible: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    withheld: tuple[str, ...] = ()
    paid: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """The visible tests that stand in the tree of a rollout."""
        return tuple(test for test in self.visible if test not in self.paid)

    @property
    def sides(self) -> dict[str, tuple[str, ...]]:
        """The sets of tests of which each must tell the code from a stub; without the empty ones."""
        sides = {"visible": self.visible, "paid": self.paid, "hidden": self.hidden}
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


def unsplit_subject(deletion: Deletion) -> Subject:
    """A deletion whose tests are not known yet."""
    changes = Changes(deletion.edits, deletion.removed_files, deletion.test_edits, deletion.test_edits)
    return Subject(changes, tuple(cut.edit for cut in deletion.bodies), deletion.removal == "whole")


def subject_of(store: TaskStore, task: Task) -> Subject:
    """A stored task as the gates see it."""
    record, secret = store.record(task.task_id), store.secret(task.task_id)
    return Subject(
        changes=record.changes,
        stub_edits=record.stub_edits or record.edits,
        is_whole=record.removal == "whole",
        visible=task.tests.visible,
        hidden=task.tests.hidden,
        withheld=secret.withheld,
        paid=task.tests.paid,
    )


def golden_patch(store: TaskStore, task: Task) -> str:
    """The unified diff that puts the code back. Never to be shown to a policy."""
    subject, record = subject_of(store, task), store.record(task.task_id)
    return subject.golden_patch({path: store.original(record, path) for path in subject.changes.source_files})


def bench_of(store: TaskStore, task: Task) -> Bench:
    """Where a stored task is tried out, with the time that its build gave to a whole suite."""
    slug = store.record(task.task_id).repository_record
    record = store.repository(slug)
    bench = make_bench(
        store.repository_files(slug), store.environment(task), store.backend, record.suite_seconds
    )
    return replace(bench, left_out=record.left_out)


# --- Which of a deletion's failing tests a solver sees, which are paid but not shown, and which are hidden.

PAID_SHARE = 1 / 3
"""Of the visible test functions of a task, those that are paid but not shown."""
MIN_VISIBLE_FUNCTIONS = 3
"""With fewer of them all are shown: a policy needs tests to work with."""


def part_subject(
    unsplit: Subject,
    failing: frozenset[str],
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    *,
    hidden_share: float,
    seed: int,
    salt: str,
    given: Collection[str] = (),
) -> Subject:
    """Part the failing tests of a deletion into visible and hidden ones, and the trees with them; all visible ones are shown.

    What would not be fair or not be hidden (``fair_split``) becomes visible, and others are drawn in its place.
    Another ``salt`` gives another draw; ``given`` are names that a rollout is told besides its tree.
    """
    places = frozenset(repository.places[test] for test in failing)
    to_show = _showing_rule(unsplit, original, given)
    shown: frozenset[Place] = frozenset()
    while True:
        hidden, edits = _drawn(
            unsplit.changes, places, original,
            share=hidden_share, seed=seed, salt=salt, shown=shown,
        )  # fmt: skip
        out = {test for test in repository.green if repository.places[test] in hidden}
        subject = replace(
            unsplit,
            changes=replace(unsplit.changes, visible_edits=edits),
            visible=tuple(sorted(failing - out)),
            hidden=tuple(sorted(failing & out)),
            withheld=tuple(sorted(out - failing)),
        )
        more = to_show(hidden, subject)
        if not more:
            return subject
        shown |= more


def with_paid(
    subject: Subject,
    repository: RepositoryRecord,
    original: Mapping[str, bytes],
    *,
    seed: int,
    salt: str,
    given: Collection[str] = (),
) -> Subject:
    """Take some visible test functions out of what a rollout sees: the reward counts them all the same.

    The subject as it is where fewer than ``MIN_VISIBLE_FUNCTIONS`` are visible, where none can go, or where a hidden test
    would need what only they tell.
    The arguments are those of ``part_subject``.
    """
    visible = frozenset(repository.places[test] for test in subject.visible)
    hidden = frozenset(repository.places[test] for test in subject.hidden)
    if len(visible) < MIN_VISIBLE_FUNCTIONS:
        return subject
    to_show = _showing_rule(subject, original, given)
    shown: frozenset[Place] = frozenset()
    while True:
        paid, edits = _drawn(
            subject.changes, visible, original,
            share=PAID_SHARE, seed=seed, salt=salt, shown=shown, gone=hidden,
        )  # fmt: skip
        narrowed = replace(
            subject,
            changes=replace(subject.changes, shown_edits=edits),
            paid=tuple(test for test in subject.visible if repository.places[test] in paid),
        )
        more = to_show(paid, narrowed)
        if not more:
            return subject if not paid or to_show(hidden, narrowed) else narrowed
        shown |= more


def _showing_rule(
    subject: Subject, original: Mapping[str, bytes], given: Collection[str]
) -> Callable[[Collection[Place], Subject], frozenset[Place]]:
    """Which of some functions that a subject's rollouts do not see must be shown, by ``places_to_show``."""
    words, texts = deleted_words(subject.changes, original), deleted_texts(subject.changes, original)
    return lambda places, drawn: places_to_show(
        places, original, drawn.broken(original, "rollout"), words, given, texts=texts
    )


def _drawn(
    changes: Changes,
    places: frozenset[Place],
    original: Mapping[str, bytes],
    *,
    share: float,
    seed: int,
    salt: str,
    shown: frozenset[Place],
    gone: frozenset[Place] = frozenset(),
) -> tuple[frozenset[Place], tuple[Edit, ...]]:
    """Some of the places, and the edits that take them out of the test files, where those of ``gone`` are out already."""
    edits_of: dict[str, list[Edit]] = {}
    for edit in changes.test_edits:
        edits_of.setdefault(edit.path, []).append(edit)
    paths = {place[0] for place in places | gone}
    before = {path: original[path].decode("utf-8", "replace") for path in paths & set(original)}
    texts = {path: edited_text(text, edits_of.get(path, ())) for path, text in before.items()}
    now = {_moved(place, before, edits_of): place for place in places | gone}
    split = part_tests(
        sorted(moved for moved, place in now.items() if place in places),
        texts,
        hidden_share=share,
        seed=seed,
        salt=salt,
        shown={moved for moved, place in now.items() if place in shown},
        gone={moved for moved, place in now.items() if place in gone},
        needed={path: names_elsewhere(original, path) for path in texts},
    )
    untouched = tuple(edit for edit in changes.visible_edits if edit.path not in split.files)
    shorter = (
        edit for path, text in sorted(split.files.items()) for edit in line_edits(path, before[path], text)
    )
    return frozenset(now[place] for place in split.hidden), (*untouched, *shorter)


def _moved(place: Place, original: Mapping[str, str], edits_of: Mapping[str, Sequence[Edit]]) -> Place:
    """Where a test function stands once the imports of its file are moved."""
    path, line, name = place
    if not edits_of.get(path) or path not in original:
        return place
    return path, shifted_line(original[path], edits_of[path], line), name
