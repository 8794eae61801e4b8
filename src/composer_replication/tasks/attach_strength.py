"""Measure how strong the tests of a task are, and keep the figures with it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.running.bench import Bench, Trial
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.stored_subject import subject_of
from composer_replication.tasks.subject import Subject
from composer_replication.tasks.twin.mutants import mutants_of, passes_twin
from composer_replication.tasks.twin.twin_records import Twin
from composer_replication.tasks.workers.workers import Workers

MAX_MUTANTS = 6
"""Of one task: enough to tell strong tests from weak ones, few enough for thousands of tasks."""


def attach_strength(
    store: TaskStore, task_id: str, deletion: Deletion, bench: Bench, seed: int, *, workers: Workers
) -> None:
    """Put faults into the golden code one at a time, and count which tests notice.

    ``mutants`` faults were tried; the visible tests alone notice ``killed_visible`` of them,
    the visible and hidden tests with the recorded behaviour ``killed_all``. A task that has its
    figures already is left as it is.

    Raises:
        InputError: the store is damaged (CR0411).
        SandboxFailure: the sandbox broke.
    """
    record = store.record(task_id)
    if record.strength is not None:
        return
    task = store.get(task_id)
    figures = workers.call(
        count_noticed, subject_of(store, task), deletion.bodies, store.twins(task), bench, f"{seed}/{task_id}"
    )
    store.put_task(replace(record, strength=figures), store.secret(task_id))


def count_noticed(
    subject: Subject, cuts: Sequence[BodyCut], twins: Mapping[str, Twin], bench: Bench, salt: str
) -> dict[str, int]:
    """The figures of ``attach_strength``; ``salt`` draws the faults.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    faults = _draw(cuts, bench, salt)
    seen = _killed_by_tests(subject, "rollout", subject.visible, faults, bench)
    both = [
        a or b
        for a, b in zip(seen, _killed_by_tests(subject, "hidden", subject.hidden, faults, bench), strict=True)
    ]
    for index, (cut, body) in enumerate(faults):
        if not both[index] and cut.pin in twins:
            judge = passes_twin(bench.original, cut, twins[cut.pin], bench.environment, backend=bench.backend)
            both[index] = not judge([body])[0]
    return {"mutants": len(faults), "killed_visible": sum(seen), "killed_all": sum(both)}


def _draw(cuts: Sequence[BodyCut], bench: Bench, salt: str) -> list[tuple[BodyCut, str]]:
    """Faulty bodies of all functions of a task, as many as are tried."""
    faults = [
        (cut, mutant.body)
        for cut in cuts
        for mutant in mutants_of(bench.original[cut.path].decode(), cut, max_mutants=MAX_MUTANTS)
    ]
    if len(faults) > MAX_MUTANTS:
        draw = random.Random(salt)  # noqa: S311  a sample, not a secret
        faults = [faults[number] for number in sorted(draw.sample(range(len(faults)), MAX_MUTANTS))]
    return faults


def _killed_by_tests(
    subject: Subject, view: str, tests: Sequence[str], faults: Sequence[tuple[BodyCut, str]], bench: Bench
) -> list[bool]:
    if not tests:
        return [False] * len(faults)
    golden = subject.golden(bench.original, view)
    trials = []
    for cut, body in faults:
        text = bench.original[cut.path].decode()
        faulty = text[: cut.start] + body + text[cut.end :]
        trials.append(Trial({**golden, cut.path: faulty.encode()}, tests, stop_at_first_failure=True))
    reports = bench.run_all(trials)
    return [bool(report.error) or not report.passed.issuperset(tests) for report in reports]
