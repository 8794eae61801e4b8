"""All gates again, from the bytes that the store keeps and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.sandbox import runs_interrupted
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
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.twin.build_twins import Twin, judge_twin
from composer_replication.tasks.views import Changes

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
    with ThreadPoolExecutor(max(1, jobs), thread_name_prefix="tasks-validate") as pool:
        futures = [pool.submit(validate_task, store, task_id, max(1, repeat)) for task_id in task_ids]
        try:
            for done, (task_id, future) in enumerate(zip(task_ids, futures, strict=True), start=1):
                failed.extend(future.result())
                if progress is not None:
                    progress(done, len(task_ids), task_id)
        except KeyboardInterrupt:
            with runs_interrupted():
                pool.shutdown(cancel_futures=True)
            raise
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not any(failure.gate == "damaged" for failure in failed):
        check_parquet(store)
    return ValidationSummary(len(task_ids), len(task_ids) - len(failed), tuple(failed))


def validate_task(store: TaskStore, task_id: str, repeat: int = 1) -> Sequence[ValidationFailure]:
    """No failure, or the first one.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    try:
        task = store.get(task_id)
        slug = store.record(task_id).repository_record
        bench = make_bench(store.repository_files(slug), store.environment(task), store.backend)
        _check(store, task, bench, repeat)
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
