"""What the gates judge: a deletion, its tests, and every tree that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from composer_replication.records import Edit, Task
from composer_replication.tasks.patches import make_patch
from composer_replication.tasks.planning.body_cuts import MARKER_STATEMENT
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.planning.edits import edited_files
from composer_replication.tasks.repository import make_bench
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
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
        """The unified diff that puts the code back; the files that lost code are enough of ``original``.

        Raises:
            KeyError, ValueError: the edits do not fit the files.
            InputError: no patch can be made of it (CR0446).
        """
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
    """The unified diff that puts the code back. Never to be shown to a policy.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    subject, record = subject_of(store, task), store.record(task.task_id)
    return subject.golden_patch({path: store.original(record, path) for path in subject.changes.source_files})


def bench_of(store: TaskStore, task: Task) -> Bench:
    """Where a stored task is tried out, with the time that its build gave to a whole suite.

    Raises:
        InputError: the repository or its environment is damaged, or does not fit this machine.
    """
    slug = store.record(task.task_id).repository_record
    record = store.repository(slug)
    bench = make_bench(
        store.repository_files(slug), store.environment(task), store.backend, record.suite_seconds
    )
    return replace(bench, left_out=record.left_out)
