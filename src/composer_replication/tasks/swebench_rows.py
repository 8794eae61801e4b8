"""Tasks in the shape of SWE-bench: a public row, and one with the patch and the hidden tests.

``base_commit`` is not of git: it is the sha256 of the base tree, which is what a rollout sees
(hidden and paid test functions are not in it). In the secret row ``patch`` puts the code back,
``test_patch`` the tests as they were; both together give the original tree. The public row has
no ``patch``, an empty ``test_patch``, and knows of the tests that are shown alone. Lists of tests are JSON
strings, as in the published data sets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.tasks.instructions.writing import write_instruction
from composer_replication.tasks.instructions.written_instructions import written_instruction
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.tree_rules import is_test_path
from composer_replication.tasks.patches import make_patch
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.views import view_files

Row = dict[str, str | int | None]
Progress = Callable[[int, int, str], None]
"""Takes (done, total, task id)."""

SWEBENCH_COLUMNS = (
    "instance_id",
    "repo",
    "base_commit",
    "problem_statement",
    "hints_text",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "version",
    "created_at",
    "environment_setup_commit",
)
OWN_COLUMNS = ("granularity", "removal", "symbol", "path", "num_body_lines", "licence")
PUBLIC_COLUMNS = (*SWEBENCH_COLUMNS, *OWN_COLUMNS)
SECRET_COLUMNS = (*SWEBENCH_COLUMNS, "patch", *OWN_COLUMNS, "broken_patch", "hidden_tests", "paid_tests")


def tree_sha256(digests: Mapping[str, str]) -> str:
    """One hash over a tree: sha256 of the lines ``SHA256 PATH`` in the order of the paths."""
    return sha256_of("\n".join(f"{digests[path]} {path}" for path in sorted(digests)).encode())


def iter_rows(store: TaskStore, progress: Progress | None = None) -> Iterator[tuple[Row, Row]]:
    """The public and the secret row of every task, in the order of their ids; ``progress`` is told after each."""
    tasks = store.tasks()
    for done, task in enumerate(tasks, start=1):
        yield rows_of(store, task)
        if progress is not None:
            progress(done, len(tasks), task.task_id)


def rows_of(store: TaskStore, task: Task) -> tuple[Row, Row]:
    """The public and the secret row of one task."""
    base, golden, base_sha256 = _trees(store, task)
    record = store.record(task.task_id)
    repository = store.repository(record.repository_record)
    withheld = store.secret(task.task_id).withheld
    paid = {repository.places[test] for test in task.tests.paid}
    others = [test for test in task.tests.pass_to_pass if repository.places[test] not in paid]
    name, _, version = task.repository.partition("==")
    public: Row = {
        "instance_id": task.task_id,
        "repo": name,
        "base_commit": base_sha256,
        "problem_statement": _statement(store, task),
        "hints_text": "",
        "test_patch": "",
        "FAIL_TO_PASS": json.dumps(sorted(task.tests.shown)),
        "PASS_TO_PASS": json.dumps(sorted(others)),
        "version": version,
        "created_at": "",  # the same input gives the same bytes: there is no time in a store
        "environment_setup_commit": task.environment,
        "granularity": task.granularity,
        "removal": task.removal,
        "symbol": task.symbol,
        "path": task.path,
        "num_body_lines": task.num_body_lines,
        "licence": repository.licence.spdx or "",
    }
    source, tests = (
        [
            {path: data for path, data in tree.items() if is_test_path(path) is of_tests}
            for tree in (base, golden)
        ]
        for of_tests in (False, True)
    )
    secret: Row = {
        **public,
        "patch": _patch(*source),
        "test_patch": _patch(*tests),
        "FAIL_TO_PASS": json.dumps(sorted(task.fail_to_pass)),
        "PASS_TO_PASS": json.dumps(sorted({*task.tests.pass_to_pass, *withheld})),
        "broken_patch": _patch(source[1], source[0]),
        "hidden_tests": json.dumps(sorted(task.tests.hidden)),
        "paid_tests": json.dumps(sorted(task.tests.paid)),
    }
    return public, {column: secret[column] for column in SECRET_COLUMNS}


def _trees(store: TaskStore, task: Task) -> tuple[dict[str, bytes], dict[str, bytes], str]:
    """The files of a task that differ between its views, as a rollout sees them and as they were; a hash of the whole base tree."""
    record = store.record(task.task_id)
    digests = store.repository(record.repository_record).files
    tests = record.changes.edits_of_tests("rollout")
    edited = {edit.path for edit in (*record.edits, *tests)} | set(record.removed_files)
    golden = {path: store.blob(digests[path]) for path in sorted(edited & set(digests))}
    base = view_files(golden, record.changes, "rollout")
    kept = {path: digest for path, digest in digests.items() if path not in golden}
    return base, golden, tree_sha256({**kept, **{path: sha256_of(base[path]) for path in base}})


def _patch(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str | None:
    """The patch; None where a changed file is no UTF-8 text, which no JSON or Parquet text can hold."""
    try:
        return make_patch(old, new)
    except InputError:
        return None


def _statement(store: TaskStore, task: Task) -> str | None:
    """What a model wrote of the task, else the instruction; None where even the shortest would show code."""
    written = written_instruction(store, task.task_id)
    if written is not None:
        return written.text
    try:
        return write_instruction(store, task)
    except InputError as error:
        if error.code != "CR0429":
            raise
        return None
