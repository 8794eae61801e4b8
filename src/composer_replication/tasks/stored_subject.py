"""A stored task as the gates see it."""

from __future__ import annotations

from composer_replication.records import Task
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
        golden_patch=secret.golden_patch,
        visible=task.tests.visible,
        hidden=task.tests.hidden,
        withheld=secret.withheld,
    )
