"""A truth stronger than the reward for each task: recorded behaviour, and how strong all of it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.tasks.attach_strength import attach_strength
from composer_replication.tasks.attach_twins import attach_twins, twin_cuts
from composer_replication.tasks.lookup_gate import LookupFindings, LookupTrial, passed_by_lookup
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import subject_of
from composer_replication.tasks.twin.build_twins import TwinSearch
from composer_replication.tasks.workers.workers import Workers

NO_TRUTH = "no-truth"
"""Neither a hidden test nor recorded behaviour, and it was looked for both."""
LOOKUP_PASSES = "lookup-passes"
"""Visible and hidden tests pass with a table of what the visible ones ask; see ``lookup_gate``."""
TRUTH_UNKNOWN = "truth-unknown"
"""No hidden test, and the run that records behaviour failed. No decision: the same build looks again."""

TASKS_A_PART = 4
"""So many tasks are measured in the same sandboxes; a build that is cut off measures these again."""

Each = Callable[[Callable[[Any], Any], Collection[Any], str], Iterator[Any]]
"""Runs a function over items, several at a time, and says what is being done."""
Refuse = Callable[[str, str, str], None]
"""Takes a task out of the store: its id, the reason (``NO_TRUTH``, ``LOOKUP_PASSES``, ``TRUTH_UNKNOWN``), a detail."""


@dataclass(frozen=True, slots=True)
class ValidTask:
    """A task of the store that passed the gates, and what it was made of."""

    task_id: str
    repository: PreparedRepository
    deletion: Deletion


def add_truth(
    store: TaskStore,
    tasks: Sequence[ValidTask],
    seed: int,
    *,
    each: Each,
    workers: Workers,
    refuse: Refuse,
) -> Mapping[str, Mapping[str, str]]:
    """Record what deleted functions do, and measure how strong the tests of each task are.

    ``refuse`` is told of tasks that have neither hidden tests nor recorded behaviour, and of those that a table of
    the visible tests' calls solves, as soon as that is known: a build that is cut off later does not ask again.
    Where the run that records failed, tasks with hidden tests stay as they are, with ``twins`` None; where tables
    could not be tried, without figures of strength. Either way the next build looks again.

    Returns:
        Why a function could not be looked at, by repository and pin: it has no twin for that, or nobody knows
        whether a table of answers would stand for it.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    rows = _by_repository(tasks)

    def record(own: list[ValidTask]) -> tuple[str, TwinSearch]:
        repository = own[0].repository
        return repository.slug, attach_twins(
            store, repository, [(task.task_id, task.deletion) for task in own], seed, workers
        )

    def measure(own: list[ValidTask]) -> None:
        tasks = [(task.task_id, task.deletion) for task in own]
        attach_strength(store, tasks, own[0].repository.bench, seed, workers=workers)

    found: dict[str, TwinSearch] = dict(each(record, rows, "twins of repositories"))
    left = []
    for task in tasks:
        if store.get(task.task_id).has_hidden_tests:
            left.append(task)
        else:
            refuse(task.task_id, *_why_refused(task, found[task.repository.slug]))
    unknown = {slug: dict(search.unknown) for slug, search in found.items()}
    new = [task for task in left if store.record(task.task_id).strength is None]
    settled = set()
    for slug, findings in each(
        lambda own: _learned(store, own, workers), _by_repository(new), "tables of answers"
    ):
        for task_id, why in findings.passed.items():
            refuse(task_id, LOOKUP_PASSES, why)
        settled |= findings.passed.keys() | findings.untried.keys()
        for pins in findings.untried.values():
            unknown[slug] = {**pins, **unknown[slug]}
    unmeasured = _by_repository([task for task in left if task.task_id not in settled])
    parts = [
        own[first : first + TASKS_A_PART] for own in unmeasured for first in range(0, len(own), TASKS_A_PART)
    ]
    list(each(measure, parts, "strength of tasks"))
    names = {own[0].repository.slug: own[0].repository.record.repository for own in rows}
    return {names[slug]: pins for slug, pins in unknown.items() if pins}


def _by_repository(tasks: Sequence[ValidTask]) -> list[list[ValidTask]]:
    rows: dict[str, list[ValidTask]] = {}
    for task in tasks:
        rows.setdefault(task.repository.slug, []).append(task)
    return list(rows.values())


def _learned(store: TaskStore, tasks: Sequence[ValidTask], workers: Workers) -> tuple[str, LookupFindings]:
    """Which tasks of one repository a table passes, of those in which a function has no twin; by its slug."""
    repository = tasks[0].repository
    trials = []
    for task in tasks:
        secret = store.secret(task.task_id)
        if secret.hidden and not {cut.pin for cut in task.deletion.bodies} <= set(secret.twins or ()):
            subject = subject_of(store, store.get(task.task_id))
            trials.append(LookupTrial(task.task_id, subject, tuple(task.deletion.bodies)))
    if not trials:
        return repository.slug, LookupFindings()
    bench = repository.bench_for(task.deletion for task in tasks)
    return repository.slug, workers.call(passed_by_lookup, bench, trials)


def _why_refused(task: ValidTask, search: TwinSearch) -> tuple[str, str]:
    cuts = twin_cuts(task.deletion)
    unknown = [search.unknown[cut.pin] for cut in cuts if cut.pin in search.unknown]
    if unknown:
        return TRUTH_UNKNOWN, f"no test function can be hidden, and recording failed: {unknown[0]}"
    reasons = sorted({search.without[cut.pin] for cut in cuts if cut.pin in search.without})
    why = "; ".join(reasons) or "no function of it can be recorded alone"
    return NO_TRUTH, f"no test function can be hidden, and the behaviour cannot be recorded: {why}"
