"""Write a candidate that passed all gates into a store."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import PurePosixPath

from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.planning.edits import edited_files
from composer_replication.tasks.proposal import Proposal
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import SecretRecord, TaskRecord
from composer_replication.tasks.subject import Subject


def keep_task(
    store: TaskStore,
    repository: PreparedRepository,
    deletion: Deletion,
    subject: Subject,
    *,
    proposal: Proposal | None = None,
) -> str:
    """Write a candidate that passed all gates into the store; its task id.

    ``proposal`` is what a foreign task set says of it, where it comes from one.
    """
    task_id = make_task_id(repository.slug, deletion, repository.bench.original)
    golden = deletion.golden_code(repository.bench.original)
    is_edited_by_stubs = deletion.removal == "body"
    record = TaskRecord(
        task_id=task_id,
        repository=repository.record.repository,
        repository_record=repository.slug,
        path=deletion.path,
        symbol=deletion.symbol,
        granularity=deletion.granularity,
        removal=deletion.removal,
        edits=subject.changes.edits,
        stub_edits=() if is_edited_by_stubs else subject.stub_edits,
        removed_files=subject.changes.removed_files,
        test_edits=subject.changes.test_edits,
        visible_edits=subject.changes.visible_edits,
        visible=subject.visible,
        environment=repository.record.environment,
        num_body_lines=sum(bool(line.strip()) for line in golden.splitlines()),
        statement="" if proposal is None else proposal.statement,
        instance_id="" if proposal is None else proposal.instance_id,
    )
    store.put_task(record, SecretRecord(task_id, subject.hidden, subject.withheld))
    return task_id


def make_task_id(slug: str, deletion: Deletion, original: Mapping[str, bytes]) -> str:
    """``toolz-1.2.0--toolz.itertoolz--concatv--1a2b3c4d``: safe in a file name, derived from the content."""
    path = PurePosixPath(deletion.path)
    parts = [part for part in (*path.parts[:-1], path.stem) if part not in ("src", "lib", "__init__")]
    size = f"{deletion.granularity}-{deletion.removal}"
    if size == "function-body":
        broken = edited_files(original, deletion.edits)[deletion.path]
        content: list[object] = [
            deletion.path,
            deletion.symbol,
            sha256_of(broken),
            deletion.golden_code(original),
        ]
        names = [slug, ".".join(parts), deletion.symbol]
    else:
        edits = [astuple(edit) for edit in deletion.edits]
        content = [deletion.pin, edits, deletion.removed_files, deletion.golden_code(original)]
        names = [slug, ".".join(parts), deletion.symbol, size]
    readable = re.sub(r"[^A-Za-z0-9._+-]", "-", "--".join(names))[:160]
    return f"{readable}--{sha256_of(json.dumps(content).encode())[:8]}"
