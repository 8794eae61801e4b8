"""Two claims of a build that ``validate`` looks at on request, because each costs another run of a whole suite."""

from __future__ import annotations

from collections.abc import Sequence

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.tasks.gate_failed import GateFailed
from composer_replication.tasks.lookup_gate import LookupFindings, LookupTrial, passed_by_lookup
from composer_replication.tasks.planning.body_cuts import BodyCut, find_body_cuts
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.stored_subject import bench_of, subject_of
from composer_replication.tasks.subject import Subject


def check_rollout_tree(subject: Subject, task: Task, bench: Bench) -> None:
    """PASS_TO_PASS passes in the tree that a rollout sees: without the code, and without the hidden test functions.

    The gates of a build run it in the tree that has all tests; a test that leans on a hidden one beside it
    would pass there alone.

    Raises:
        GateFailed: broken-run-fails, or other-tests-fail with a name (these tests are public).
        SandboxFailure: the sandbox broke.
    """
    report = bench.run(subject.broken(bench.original, "rollout"), None)
    if report.error:
        raise GateFailed("broken-run-fails", f"in the tree of a rollout: {report.error}")
    lost = sorted(set(task.tests.pass_to_pass) - report.passed)
    if lost:
        raise GateFailed(
            "other-tests-fail",
            f"{len(lost)} of PASS_TO_PASS do not pass in the tree of a rollout, such as {lost[0]}",
        )


def learned_by_heart(store: TaskStore, task_ids: Sequence[str]) -> LookupFindings:
    """Which tasks of one repository a table of the visible tests' calls solves, and of which nobody knows.

    As at build, tasks are tried in which a function has no recorded behaviour and a test is hidden. A task whose
    files are damaged is left out: another check says so.

    Raises:
        InputError: the repository or its environment is damaged, or does not fit this machine.
        SandboxFailure: the sandbox broke.
    """
    trials = []
    for task_id in task_ids:
        try:
            trial = _trial(store, task_id)
        except InputError:
            continue
        if trial is not None:
            trials.append(trial)
    if not trials:
        return LookupFindings()
    return passed_by_lookup(bench_of(store, store.get(trials[0].task_id)), trials)


def _trial(store: TaskStore, task_id: str) -> LookupTrial | None:
    task, secret = store.get(task_id), store.secret(task_id)
    subject = subject_of(store, task)
    cuts = _cuts(store, task_id, subject)
    if not secret.hidden or {cut.pin for cut in cuts} <= set(secret.twins or ()):
        return None
    return LookupTrial(task_id, subject, cuts)


def _cuts(store: TaskStore, task_id: str, subject: Subject) -> tuple[BodyCut, ...]:
    """The functions that are gone in a task, from the stored places of their bodies."""
    original = store.repository_files(store.record(task_id).repository_record)
    spans = {(edit.path, edit.start, edit.end) for edit in subject.stub_edits}
    return tuple(
        cut
        for path in sorted({path for path, _, _ in spans})
        for cut in find_body_cuts(path, original[path].decode("utf-8", "replace"))
        if (path, cut.start, cut.end) in spans
    )
