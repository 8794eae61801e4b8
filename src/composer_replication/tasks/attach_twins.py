"""Give tasks their twins: what the deleted functions do, as a truth stronger than the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from composer_replication.tasks.fair_split import is_named, words_of
from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.repository import PreparedRepository
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import subject_of
from composer_replication.tasks.twin.build_twins import TwinSearch, build_twins
from composer_replication.tasks.twin.twin_judge import judge_twin
from composer_replication.tasks.twin.twin_records import Twin, twin_bytes
from composer_replication.tasks.workers.workers import Workers

SAME_BEFORE = "the code before the patch does the same"
UNNAMED = "nothing that stays in the tree says what it is called"


def attach_twins(
    store: TaskStore,
    repository: PreparedRepository,
    tasks: Sequence[tuple[str, Deletion]],
    seed: int,
    workers: Workers,
) -> TwinSearch:
    """Record the functions of some tasks of one repository in one run, and keep the twins as secrets.

    Tasks whose functions were looked at by an earlier build are left as they are. So are tasks with
    a function of which nothing could be learned (``twins`` stays None), and tasks that have neither
    hidden tests nor a twin: they are about to be refused, with the reason that is given here. A task
    of a foreign set has code where ours have a hole, so it keeps only twins that its broken tree fails.

    Args:
        store: where the tasks are.
        repository: theirs.
        tasks: id and deletion of each.
        seed: draws the mutated calls.
        workers: run the functions.

    Returns:
        Why functions have no twin, or nothing is known of them; the twins themselves are in the store.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    fair = {task_id: _known_cuts(store, task_id, one, repository.bench) for task_id, one in tasks}
    waiting = [(task_id, one) for task_id, one in tasks if store.secret(task_id).twins is None]
    cuts = {cut.pin: cut for task_id, _ in waiting for cut in fair[task_id]}
    # Of all tasks, not of those that wait: a build that was killed here must go on to the same twins.
    blind = [task_id for task_id, _ in tasks if not store.secret(task_id).hidden]
    eager = frozenset(cut.pin for task_id in blind for cut in fair[task_id])
    bench = repository.bench_for(deletion for _, deletion in tasks)
    found = workers.call(twins_on, bench, [cuts[pin] for pin in sorted(cuts)], seed, eager)
    digests = {pin: store.put_blob(twin_bytes(twin), is_packed=True) for pin, twin in found.twins.items()}
    for task_id, deletion in waiting:
        pins = [cut.pin for cut in fair[task_id]]
        for cut in twin_cuts(deletion):
            if cut.pin not in pins:
                found.without.setdefault(cut.pin, UNNAMED)
        own = {pin: digests[pin] for pin in pins if pin in digests}
        if own and store.record(task_id).instance_id:
            broken = subject_of(store, store.get(task_id)).broken(repository.bench.original, "hidden")
            twins = {pin: found.twins[pin] for pin in own}
            for pin in workers.call(passed_by, broken, twins, repository.bench):
                del own[pin]
                found.without.setdefault(pin, SAME_BEFORE)
        secret = store.secret(task_id)
        if found.unknown.keys().isdisjoint(pins) and (own or secret.hidden):
            # Figures that were measured without the twins are measured again.
            record = replace(store.record(task_id), strength=None)
            store.put_task(record, replace(secret, twins=own))
    return replace(found, twins={})


def twins_on(bench: Bench, cuts: Sequence[BodyCut], seed: int, eager: frozenset[str]) -> TwinSearch:
    """As ``build_twins``, of functions of the repository that stands on a bench."""
    return build_twins(
        bench.original,
        bench.environment,
        cuts,
        backend=bench.backend,
        left_out=bench.left_out,
        seed=seed,
        eager=eager,
    )


def passed_by(files: Mapping[str, bytes], twins: Mapping[str, Twin], bench: Bench) -> list[str]:
    """The pins of those twins that a tree passes.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    return [
        pin
        for pin, twin in twins.items()
        if judge_twin(
            files, bench.environment, twin, backend=bench.backend, timeout_seconds=bench.suite_seconds
        ).passed
    ]


def twin_cuts(deletion: Deletion) -> list[BodyCut]:
    """The functions whose twin is fair to every honest answer that knows their names.

    A method's recorded calls hold objects with the attributes that the original class gave
    them. An answer that writes the whole class may choose others, so methods take part only
    where one body alone is asked for.
    """
    is_one_body = deletion.granularity == "function" and deletion.removal == "body"
    return [cut for cut in deletion.bodies if is_one_body or "." not in cut.symbol]


def _known_cuts(store: TaskStore, task_id: str, deletion: Deletion, bench: Bench) -> list[BodyCut]:
    """Those of ``twin_cuts`` whose names a rollout can know; with a body gone, its signature stays."""
    cuts = twin_cuts(deletion)
    if deletion.removal == "body" or not cuts:
        return cuts
    shown = subject_of(store, store.get(task_id)).broken(bench.original, "rollout")
    given = words_of(f"{deletion.path} {deletion.symbol}")
    return [cut for cut in cuts if is_named(cut.path, cut.symbol, shown, given)]
