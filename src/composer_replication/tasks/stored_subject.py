"""A stored task as the gates see it, and where it is tried out."""

from __future__ import annotations

from dataclasses import replace

from composer_replication.records import Task
from composer_replication.tasks.repository import make_bench
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.views import Changes


def subject_of(store: TaskStore, task: Task) -> Subject:
    """A stored task as the gates see it."""
    record, secret = store.record(task.task_id), store.secret(task.task_id)
    return Subject(
        changes=Changes(record.edits, record.removed_files, record.test_edits, record.visible_edits),
        stub_edits=record.stub_edits or record.edits,
        is_whole=record.removal == "whole",
        visible=task.tests.visible,
        hidden=task.tests.hidden,
        withheld=secret.withheld,
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
