"""All gates again, from the bytes that the store keeps and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.sandbox.interruptible_pool import interruptible_pool
from composer_replication.tasks.gates import (
    GateFailed,
    check_hidden_out,
    check_no_copy,
    check_restores,
    check_tests,
    find_failing,
)
from composer_replication.tasks.parquet import check_parquet
from composer_replication.tasks.repository import make_bench
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.secrecy import check_secrecy
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.stored_subject import subject_of
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.thorough_checks import LOOKUP_PASSES, check_rollout_tree, learned_by_heart
from composer_replication.tasks.truth import TRUTH_UNKNOWN
from composer_replication.tasks.twin.build_twins import Twin, judge_twin

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class ValidationFailure:
    """One task that does not pass, the gate and what it said."""

    task_id: str
    gate: str
    detail: str


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """``tasks`` were tried, ``passed`` passed every gate every time."""

    tasks: int
    passed: int
    failed: tuple[ValidationFailure, ...]


def validate_store(
    path: Path,
    *,
    repeat: int = 3,
    jobs: int = 2,
    thorough: bool = False,
    backend: str | None = None,
    progress: Progress | None = None,
) -> ValidationSummary:
    """Put every task of a store through the gates again.

    The static gates, the search for leaks and the whole suite without the body run once a task, the gates of its
    own tests and of its recorded behaviour ``repeat`` times, in fresh sandboxes. A task whose files are damaged
    fails with the gate ``damaged``.

    Args:
        path: folder of the store.
        repeat: how often; at least 1. What passes once and not again is flaky.
        jobs: tasks tried at the same time.
        thorough: also run PASS_TO_PASS in the tree that a rollout sees, and let a table of the visible tests'
            calls try to pass the hidden ones; see ``thorough_checks``.
        backend: sandbox backend; None for the best of this machine.
        progress: told after each task with (done, total, task id).

    Raises:
        NothingToDoError: the store is empty (CR0427).
        InputError: not a store (CR0410), or its manifest or a Parquet file is damaged (CR0411).
        SandboxFailure: the sandbox broke; nothing is said about any task.
    """
    store = TaskStore.open(path, backend=backend)
    for (
        name
    ) in store.derived:  # said at once; what is in them is compared when the tasks are known to be whole
        store.read_derived(name)
    task_ids = store.require_task_ids()
    failed: list[ValidationFailure] = []
    with interruptible_pool(jobs, "tasks-validate") as pool:
        futures = [
            pool.submit(validate_task, store, task_id, max(1, repeat), thorough=thorough)
            for task_id in task_ids
        ]
        learned = (
            [pool.submit(_learned, store, own) for own in _by_repository(store, task_ids)] if thorough else []
        )
        for done, (task_id, future) in enumerate(zip(task_ids, futures, strict=True), start=1):
            failed.extend(future.result())
            if progress is not None:
                progress(done, len(task_ids), task_id)
        known = {failure.task_id for failure in failed}
        rows = [failure for future in learned for failure in future.result()]
        failed.extend(failure for failure in rows if failure.task_id not in known)
    if not any(failure.gate == "damaged" for failure in failed):
        check_parquet(store)
    return ValidationSummary(len(task_ids), len(task_ids) - len(failed), tuple(failed))


def _by_repository(store: TaskStore, task_ids: Sequence[str]) -> list[list[str]]:
    rows: dict[str, list[str]] = {}
    for task_id in task_ids:
        with contextlib.suppress(InputError):  # damaged: its own check says so
            rows.setdefault(store.record(task_id).repository_record, []).append(task_id)
    return list(rows.values())


def _learned(store: TaskStore, task_ids: Sequence[str]) -> list[ValidationFailure]:
    try:
        found = learned_by_heart(store, task_ids)
    except InputError as error:
        return [ValidationFailure(task_ids[0], "damaged", f"{error.message} ({error.where})")]
    rows = [ValidationFailure(task_id, LOOKUP_PASSES, why) for task_id, why in sorted(found.passed.items())]
    for task_id, pins in sorted(found.untried.items()):
        why = min(pins.values()).partition(" (")[0]  # the last output, which may name a hidden test, is left out
        detail = f"a table of the visible tests' calls could not be tried: {why}"
        rows.append(ValidationFailure(task_id, TRUTH_UNKNOWN, detail))
    return rows


def validate_task(
    store: TaskStore, task_id: str, repeat: int = 1, *, thorough: bool = False
) -> Sequence[ValidationFailure]:
    """No failure, or the first one.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    try:
        task = store.get(task_id)
        slug = store.record(task_id).repository_record
        bench = make_bench(store.repository_files(slug), store.environment(task), store.backend)
        _check(store, task, bench, repeat)
        if thorough:
            check_rollout_tree(subject_of(store, task), task, bench)
    except GateFailed as error:
        return (ValidationFailure(task_id, error.gate, error.detail),)
    except InputError as error:
        return (ValidationFailure(task_id, "damaged", f"{error.message} ({error.where})"),)
    return ()


def _check(store: TaskStore, task: Task, bench: Bench, repeat: int) -> None:
    subject, twins = subject_of(store, task), store.twins(task)
    repository = store.repository(store.record(task.task_id).repository_record)
    check_restores(subject, bench.original)
    check_no_copy(subject, bench.original)
    check_hidden_out(subject, repository, bench.original)
    check_secrecy(store, task)
    failing = find_failing(subject, repository, bench)
    num_different = len(failing ^ set(task.fail_to_pass))
    if num_different:  # no name: a hidden test may be among them
        raise GateFailed("other-tests-fail", f"{num_different} tests differ from the stored ones")
    for _ in range(repeat):
        check_tests(subject, bench)
        for pin in sorted(twins):
            _check_twin(subject, twins[pin], bench)


def _check_twin(subject: Subject, twin: Twin, bench: Bench) -> None:
    """The golden code does in every recorded and mutated call what was recorded; the broken tree does not pass.

    Neither the function nor a call is named: what is printed here must tell nothing of the truth.

    Raises:
        GateFailed: golden-fails or broken-passes.
        InputError: the twin needs another cloudpickle (CR0471).
        SandboxFailure: the sandbox broke.
    """
    golden, broken = (
        judge_twin(tree, bench.environment, twin, backend=bench.backend, timeout_seconds=bench.suite_seconds)
        for tree in (subject.golden(bench.original, "hidden"), subject.broken(bench.original, "hidden"))
    )
    agree = golden.recorded_agree + golden.mutated_agree
    total = golden.num_recorded + golden.num_mutated
    if not golden.passed or agree != total:
        detail = golden.error or f"it agrees in {agree} of {total} calls"
        raise GateFailed("golden-fails", f"the golden code does not do what was recorded: {detail}")
    if broken.passed:
        raise GateFailed("broken-passes", "the recorded behaviour is there without the code")
