"""Give tasks their twins: what the deleted functions do, as a truth stronger than the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.twin.build_twins import build_twins, twin_bytes
from composer_replication.tasks.twin.twin_records import Twin
from composer_replication.tasks.workers.workers import Workers


def attach_twins(
    store: TaskStore,
    repository: PreparedRepository,
    tasks: Sequence[tuple[str, Deletion]],
    seed: int,
    workers: Workers,
) -> int:
    """Record the functions of some tasks of one repository in one run, and keep the twins as secrets.

    Tasks whose functions were looked at by an earlier build are left as they are.

    Args:
        store: where the tasks are.
        repository: theirs.
        tasks: id and deletion of each.
        seed: draws the mutated calls.
        workers: run the functions.

    Returns:
        How many functions have a twin now.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    waiting = [(task_id, one) for task_id, one in tasks if store.secret(task_id).twins is None]
    cuts = {cut.pin: cut for _, deletion in waiting for cut in twin_cuts(deletion)}
    twins = workers.call(twins_on, repository.bench, [cuts[pin] for pin in sorted(cuts)], seed)
    digests = {pin: store.put_blob(twin_bytes(twin), is_packed=True) for pin, twin in twins.items()}
    for task_id, deletion in waiting:
        own = {cut.pin: digests[cut.pin] for cut in twin_cuts(deletion) if cut.pin in digests}
        store.put_task(store.record(task_id), replace(store.secret(task_id), twins=own))
    return len(twins)


def twins_on(bench: Bench, cuts: Sequence[BodyCut], seed: int) -> dict[str, Twin]:
    """As ``build_twins``, of functions of the repository that stands on a bench."""
    return dict(build_twins(bench.original, bench.environment, cuts, backend=bench.backend, seed=seed))


def twin_cuts(deletion: Deletion) -> list[BodyCut]:
    """The functions whose twin is fair to every honest answer.

    A method's recorded calls hold objects with the attributes that the original class gave
    them. An answer that writes the whole class may choose others, so methods take part only
    where one body alone is asked for.
    """
    is_one_body = deletion.granularity == "function" and deletion.removal == "body"
    return [cut for cut in deletion.bodies if is_one_body or "." not in cut.symbol]
