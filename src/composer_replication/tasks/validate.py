"""All gates again, from the bytes that the store keeps and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.sandbox import choose_backend, require_selftest
from composer_replication.sandbox.supervised_run import interruptible_pool
from composer_replication.tasks import gates
from composer_replication.tasks.build import Progress
from composer_replication.tasks.gates import GateFailed, Subject
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import sandbox_in_force
from composer_replication.tasks.test_functions import words_of
from composer_replication.tasks.truth import NO_TRUTH
from composer_replication.tasks.twin import twin_run
from composer_replication.tasks.twin.twin_run import Twin, judge_twins, play


@dataclass(frozen=True, slots=True)
class ValidationFailure:
    """One task that does not pass, the gate and what it said."""

    task_id: str
    gate: str
    detail: str


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """``tasks`` were tried, ``passed`` passed every gate every time.

    A task with neither hidden tests nor recorded behaviour fails (``no-truth``) where its build looked for a truth.
    ``proved_by`` are the sandboxes of the builds, ``validated_in`` is that of this call: where they differ, code that
    fails may be right there.
    """

    tasks: int
    passed: int
    failed: tuple[ValidationFailure, ...]
    validated_in: str
    proved_by: tuple[str, ...] = ()


def validate_store(
    path: Path,
    *,
    repeat: int = 3,
    jobs: int = 2,
    backend: str | None = None,
    progress: Progress | None = None,
) -> ValidationSummary:
    """Put every task of a store through the gates again.

    What only reads the stored bytes (restoring, copies, the search for leaks, the instruction) gives one answer
    and is looked at once a task, and so are constants, by its own tests and against recorded behaviour. The other runs
    are made ``repeat`` times in fresh sandboxes: the whole suite without the code, the task's own tests and recorded
    behaviour with the code and without it. A task whose files are damaged fails with the gate ``damaged``.

    Args:
        path: folder of the store.
        repeat: how often; at least 1. What passes once and not again is flaky.
        jobs: tasks tried at the same time.
        backend: sandbox backend; None for the best of this machine.
        progress: told after each task that is tried with (done, total, task id).

    NothingToDoError where the store is empty (CR0604), InputError where its manifest is damaged (CR0411).
    """
    store = TaskStore.open(path, backend=backend)
    task_ids = store.require_task_ids()
    require_selftest(choose_backend(backend), progress=progress)
    told = progress or (lambda _done, _total, _task_id: None)
    check = partial(validate_task, store, repeat=max(1, repeat))
    failed: list[ValidationFailure] = []
    with interruptible_pool(jobs, "tasks-validate") as pool:  # a sandbox that broke ends it all
        for done, failure in enumerate(pool.map(check, task_ids), start=1):
            told(done, len(task_ids), task_ids[done - 1])
            failed += [failure] if failure else []
    return ValidationSummary(
        tasks=len(task_ids),
        passed=len(task_ids) - len(failed),
        failed=tuple(failed),
        validated_in=sandbox_in_force(backend),
        proved_by=store.proved_by,
    )


def validate_task(store: TaskStore, task_id: str, repeat: int = 1) -> ValidationFailure | None:
    """The first failure of a task, if there is one."""
    try:
        task = store.get(task_id)
        _check(store, task, gates.bench_of(store, task), repeat)
    except GateFailed as error:
        return ValidationFailure(task_id, error.reason, error.detail)
    except InputError as error:
        return ValidationFailure(task_id, "damaged", f"{error.message} ({error.where})")
    return None


def _check(store: TaskStore, task: Task, bench: Bench, repeat: int) -> None:
    subject, record, original = gates.subject_of(store, task), store.record(task.task_id), bench.original
    repository, twins = store.repository(record.repository_record), store.twins(task)
    # Figures of strength are the last thing that a build gives a task: it has looked for a truth before.
    if record.strength is not None and not task.has_hidden_tests:
        told = "neither a hidden test nor recorded behaviour, and its build kept one of them"
        raise GateFailed(NO_TRUTH, told)
    gates.check_restores(subject, original)
    gates.check_no_copy(subject, original)
    own = [twins[pin] for pin in sorted(twins)]
    names = [(twin.path, twin.symbol) for twin in own]
    gates.check_fair(subject, repository, original, names, words_of(f"{task.path} {task.symbol}"))
    gates.check_secrecy(store, task)
    for number in range(repeat):
        gates.prove(subject, repository, bench, stubs=() if number else gates.STUBS)
        _check_twins(subject, own, bench)
    # No constant and no table of the recorded calls passes recorded behaviour; which function stays unsaid.
    jobs = [twin_run.Job(twin, twin_run.CONSTANTS) for twin in own]
    for twin, report in zip(own, play(bench, jobs), strict=True):
        if report.error:
            raise GateFailed("truth-unknown", f"recorded behaviour could not be judged: {report.error}")
        solver = twin_run.solver_that_passes(twin, report)
        if solver == twin_run.TABLE:
            raise GateFailed("lookup-passes", f"{solver} passes all recorded behaviour")
        if solver:
            raise GateFailed("stub-passes", f"the recorded behaviour is there with return {solver}")


def _check_twins(subject: Subject, twins: Sequence[Twin], bench: Bench) -> None:
    """The golden code does in every recorded and mutated call what was recorded; the broken tree does not pass.

    Neither a function nor a call is named: what is printed here must tell nothing of the truth.
    """
    golden, broken = (
        judge_twins(replace(bench, original=tree), twins)
        for tree in (subject.golden(bench.original, "hidden"), subject.broken(bench.original, "hidden"))
    )
    for score in golden:
        agree = score.recorded_agree + score.mutated_agree
        total = score.num_recorded + score.num_mutated
        if not score.passed or agree != total:
            detail = score.error or f"it agrees in {agree} of {total} calls"
            raise GateFailed("golden-fails", f"the golden code does not do what was recorded: {detail}")
    if any(score.passed for score in broken):
        raise GateFailed("broken-passes", "the recorded behaviour is there without the code")
