"""All gates again, from the bytes that the store keeps and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from composer_replication import __version__
from composer_replication.errors import InputError
from composer_replication.records import Task
from composer_replication.run_folder import SCHEMA_VERSION
from composer_replication.sandbox import choose_backend, require_selftest
from composer_replication.sandbox.supervised_run import interruptible_pool
from composer_replication.tasks.build_state import GATES_VERSION, Progress
from composer_replication.tasks.fair_split import words_of
from composer_replication.tasks.gates import (
    check_fair,
    check_hidden_out,
    check_no_copy,
    check_restores,
    check_secrecy,
    check_stubs,
    failing_of,
    judge_split,
    split_trials,
    suite_trial,
)
from composer_replication.tasks.instructions.written_instructions import written_instruction
from composer_replication.tasks.intake.cache import cache_folder, sha256_of
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import ProvingSandbox, sandbox_in_force
from composer_replication.tasks.subject import GateFailed, Subject, bench_of, subject_of
from composer_replication.tasks.truth import LOOKUP_PASSES, NO_TRUTH, TRUTH_UNKNOWN
from composer_replication.tasks.twin.twin_run import Twin, judge_twins, play_apart, play_stubs


@dataclass(frozen=True, slots=True)
class ValidationFailure:
    """One task that does not pass, the gate and what it said."""

    task_id: str
    gate: str
    detail: str


@dataclass(frozen=True, slots=True)
class ValidationSummary:
    """``tasks`` were tried, ``passed`` passed every gate every time.

    ``without_truth`` are the ids of tasks that have neither hidden tests nor recorded behaviour, as a build
    with ``--visible-only`` keeps them. They are no failures, unless their build looked for a truth: then
    ``no-truth`` is among ``failed``. ``taken_over`` of the passed ones had passed before and were not tried again.
    ``proved_by`` are the sandboxes of the builds, ``validated_in`` is that of this call: where they differ, code that
    fails may be right there.
    """

    tasks: int
    passed: int
    failed: tuple[ValidationFailure, ...]
    validated_in: ProvingSandbox
    proved_by: tuple[ProvingSandbox, ...] = ()
    without_truth: tuple[str, ...] = ()
    taken_over: int = 0


def validate_store(
    path: Path,
    *,
    repeat: int = 3,
    jobs: int = 2,
    resume: bool = False,
    backend: str | None = None,
    progress: Progress | None = None,
) -> ValidationSummary:
    """Put every task of a store through the gates again.

    What only reads the stored bytes (restoring, copies, the search for leaks, the instruction) gives one answer
    and is looked at once a task, and so are constants, by its own tests and against recorded behaviour. Everything
    else that depends on how code runs is looked at ``repeat`` times in fresh sandboxes: the whole suite without the
    code, the task's own tests with the code and without it, and recorded behaviour with the code and without it. A
    task whose files are damaged fails with the gate ``damaged``.

    Args:
        path: folder of the store.
        repeat: how often; at least 1. What passes once and not again is flaky.
        jobs: tasks tried at the same time.
        resume: take over which tasks passed in an earlier call that had the same store, arguments and versions; their
            stored bytes are read again, and nothing is run.
        backend: sandbox backend; None for the best of this machine.
        progress: told after each task that is tried with (done, total, task id).

    Raises:
        NothingToDoError: the store is empty (CR0604).
        InputError: not a store, or its manifest is damaged (CR0411).
    """
    store = TaskStore.open(path, backend=backend)
    task_ids = store.require_task_ids()
    require_selftest(choose_backend(backend), progress=progress)
    with passed_tasks(journal_key(store, repeat=max(1, repeat)), task_ids, resume=resume) as journal:
        read: set[str] = set()
        taken = {task_id for task_id in journal.taken_over if _is_whole(store, task_id, read)}
        rest = [task_id for task_id in task_ids if task_id not in taken]
        failed = _try_all(store, rest, journal, jobs=jobs, repeat=max(1, repeat), progress=progress)
    without = tuple(task_id for task_id in task_ids if not _has_truth(store, task_id))
    passed = len(task_ids) - len(failed)
    return ValidationSummary(
        len(task_ids), passed, tuple(failed), sandbox_in_force(backend), store.proved_by, without, len(taken)
    )


def _try_all(
    store: TaskStore,
    task_ids: Sequence[str],
    journal: PassedTasks,
    *,
    jobs: int,
    repeat: int,
    progress: Progress | None,
) -> list[ValidationFailure]:
    """The first failure of each task that does not pass; the journal hears of the others as they pass."""
    failed: dict[str, ValidationFailure] = {}
    with interruptible_pool(jobs, "tasks-validate") as pool:
        futures = {pool.submit(validate_task, store, task_id, repeat): task_id for task_id in task_ids}
        for num_done, future in enumerate(as_completed(futures), start=1):
            task_id, failure = futures[future], future.result()  # a sandbox that broke ends it all
            if failure is None:
                journal.add(task_id)
            else:
                failed[task_id] = failure
            if progress is not None:
                progress(num_done, len(task_ids), task_id)
    return [failed[task_id] for task_id in task_ids if task_id in failed]


def _is_whole(store: TaskStore, task_id: str, read: set[str]) -> bool:
    """Whether all that the gates read of a task is there; what is damaged now has not passed. ``read``: repositories that are whole."""
    try:
        task = store.get(task_id)
        store.twins(task)
        store.environment_lock(task.environment)
        written_instruction(store, task_id)
        if (repository := store.record(task_id).repository_record) not in read:
            store.repository_files(repository)
            read.add(repository)
    except InputError:
        return False
    return True


def _has_truth(store: TaskStore, task_id: str) -> bool:
    try:
        return store.get(task_id).has_hidden_tests
    except InputError:  # damaged: its own check says so
        return True


def validate_task(store: TaskStore, task_id: str, repeat: int = 1) -> ValidationFailure | None:
    """The first failure of a task, if there is one."""
    try:
        task = store.get(task_id)
        _check(store, task, bench_of(store, task), repeat)
    except GateFailed as error:
        return ValidationFailure(task_id, error.reason, error.detail)
    except InputError as error:
        return ValidationFailure(task_id, "damaged", f"{error.message} ({error.where})")
    return None


def _check(store: TaskStore, task: Task, bench: Bench, repeat: int) -> None:
    subject, twins = subject_of(store, task), store.twins(task)
    record = store.record(task.task_id)
    repository = store.repository(record.repository_record)
    # Figures of strength are the last thing that a build gives a task: it has looked for a truth before.
    if record.strength is not None and not task.has_hidden_tests:
        raise GateFailed(
            NO_TRUTH, "neither a hidden test nor recorded behaviour, and its build kept one of them"
        )
    check_restores(subject, bench.original)
    check_no_copy(subject, bench.original)
    check_hidden_out(subject, repository, bench.original)
    own = [twins[pin] for pin in sorted(twins)]
    names = [(twin.path, twin.symbol) for twin in own]
    check_fair(subject, repository, bench.original, names, words_of(f"{task.path} {task.symbol}"))
    check_secrecy(store, task)
    for number in range(repeat):
        trials = [suite_trial(subject, bench), *split_trials(subject, repository, bench)]
        suite, *reports = bench.run_all(trials)
        num_different = len(failing_of(suite, subject, repository) ^ set(task.fail_to_pass))
        if num_different:  # no name: a hidden test may be among them
            raise GateFailed("other-tests-fail", f"{num_different} tests differ from the stored ones")
        seconds = judge_split(subject, bench, suite, reports)
        if number == 0:
            check_stubs(subject, bench, seconds)
        _check_twins(subject, own, bench)
    _check_twin_stubs(own, bench)


def _check_twin_stubs(twins: Sequence[Twin], bench: Bench) -> None:
    """No constant and no table of the recorded calls passes recorded behaviour; which function stays unsaid."""
    for scores in play_stubs(twins, partial(play_apart, bench)):
        if scores.report.error:
            raise GateFailed(TRUTH_UNKNOWN, f"recorded behaviour could not be judged: {scores.report.error}")
        if scores.passed_by:
            raise GateFailed(
                "stub-passes", f"the recorded behaviour is there with return {scores.passed_by[0]}"
            )
        if scores.is_passed_by_table:
            raise GateFailed(LOOKUP_PASSES, "a table of the recorded calls passes all recorded behaviour")


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


def journal_key(store: TaskStore, *, repeat: int) -> dict[str, Any]:
    """Everything that the outcome of a validation hangs on, but for the machine's good will."""
    backend = choose_backend(store.backend)
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": store.fingerprint,
        "gates_version": GATES_VERSION,
        "package_version": __version__,
        "repeat": repeat,
        "backend": f"{backend.name} {type(backend).__module__}:{type(backend).__qualname__}",
        "python": f"{sys.implementation.cache_tag} {platform.machine()}",
    }


def journal_path(key: Mapping[str, Any]) -> Path:
    """Where the tasks stand that passed under one key, one a line; ``cache prune`` knows the folder by its name."""
    digest = sha256_of(json.dumps(key, sort_keys=True).encode())[:32]
    return cache_folder() / "validations" / f"{digest}.jsonl"


@dataclass(frozen=True, slots=True)
class PassedTasks:
    """The tasks that have passed under one key; opened by ``passed_tasks``."""

    taken_over: frozenset[str]
    file: IO[bytes]

    def add(self, task_id: str) -> None:
        """Note a task that has passed; it is on the disk when this returns."""
        self.file.write(json.dumps({"task_id": task_id}).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())


@contextmanager
def passed_tasks(key: Mapping[str, Any], known: Collection[str], *, resume: bool) -> Iterator[PassedTasks]:
    """The journal of a key, held against ``cache prune`` meanwhile.

    With ``resume`` what stands in it is taken over; otherwise it begins anew, since each task is tried anew.
    """
    path = journal_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        if not resume:
            file.truncate(0)
        file.seek(0)
        data = file.read()
        if data and not data.endswith(b"\n"):  # a crash cut the last line off
            file.write(b"\n")
        lines = set(data.splitlines())
        named = (task_id for task_id in known if json.dumps({"task_id": task_id}).encode() in lines)
        yield PassedTasks(frozenset(named), file)
