"""Measure how strong the tests of tasks are, and keep the figures with them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from composer_replication.tasks.planning.body_cuts import BodyCut
from composer_replication.tasks.planning.deletion import Deletion
from composer_replication.tasks.running.bench import IDLE_SECONDS, Bench, Trial
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import Subject, subject_of
from composer_replication.tasks.twin.mutants import mutants_of
from composer_replication.tasks.twin.twin_judge import subject_of as subject_of_twin
from composer_replication.tasks.twin.twin_records import Twin, score_digests
from composer_replication.tasks.twin.twin_run import Job, play_apart
from composer_replication.tasks.workers.workers import Workers

MAX_MUTANTS = 6
"""Of one task: enough to tell strong tests from weak ones, few enough for thousands of tasks."""
MAX_LOOKED_AT = 6 * MAX_MUTANTS
"""Among so many faults they are drawn; a module has thousands."""


@dataclass(frozen=True, slots=True)
class StrengthTrial:
    """A task to be measured: its trees and tests, its functions, their recorded behaviour; ``salt`` draws the faults."""

    subject: Subject
    cuts: Sequence[BodyCut]
    twins: Mapping[str, Twin]
    salt: str

    def tests(self, view: str) -> tuple[str, ...]:
        return self.subject.hidden if view == "hidden" else self.subject.visible


@dataclass(slots=True)
class _Fault:
    """One mutant of one function, and which tests noticed it."""

    trial: StrengthTrial
    cut: BodyCut
    body: str
    seen: bool = False
    killed: bool = False

    def faulty_file(self, bench: Bench) -> str:
        text = bench.original[self.cut.path].decode()
        return text[: self.cut.start] + self.body + text[self.cut.end :]

    def run(self, view: str, seconds: float, bench: Bench) -> Trial:
        faulty = self.faulty_file(bench).encode()
        tree = {**self.trial.subject.golden(bench.original, view), self.cut.path: faulty}
        return Trial(
            tree,
            self.trial.tests(view),
            stop_at_first_failure=True,
            seconds=seconds,
            idle_seconds=IDLE_SECONDS,
        )


def attach_strength(
    store: TaskStore, tasks: Sequence[tuple[str, Deletion]], bench: Bench, seed: int, *, workers: Workers
) -> None:
    """Put faults into the golden code one at a time, and count which tests notice.

    ``mutants`` faults were tried; the visible tests alone notice ``killed_visible`` of them,
    the visible and hidden tests with the recorded behaviour ``killed_all``. A task that has its
    figures already is left as it is.

    Args:
        store: where the tasks are.
        tasks: id and deletion of some tasks of one repository; they share sandboxes.
        bench: of their repository.
        seed: draws the faults, together with the task's id.
        workers: run the tests.

    Raises:
        InputError: the store is damaged (CR0411).
        SandboxFailure: the sandbox broke.
    """
    waiting = [(task_id, one) for task_id, one in tasks if store.record(task_id).strength is None]
    trials = [
        StrengthTrial(
            subject_of(store, store.get(task_id)),
            deletion.bodies,
            store.twins(store.get(task_id)),
            f"{seed}/{task_id}",
        )
        for task_id, deletion in waiting
    ]
    for (task_id, _), figures in zip(waiting, workers.call(count_noticed, trials, bench), strict=True):
        store.put_task(replace(store.record(task_id), strength=figures), store.secret(task_id))


def count_noticed(trials: Sequence[StrengthTrial], bench: Bench) -> list[dict[str, int]]:
    """The figures of ``attach_strength``. Hidden tests are asked only about faults that no visible test notices, and
    recorded behaviour only about those that are left then.

    Raises:
        SandboxFailure: the sandbox broke.
    """
    faults = [_Fault(trial, cut, body) for trial in trials for cut, body in _draw(trial, bench)]
    for fault, noticed in _noticed_by_tests(faults, "visible", bench):
        fault.seen = fault.killed = noticed
    for fault, noticed in _noticed_by_tests([one for one in faults if not one.seen], "hidden", bench):
        fault.killed = noticed
    for fault, agrees in _judged_by_twins([one for one in faults if not one.killed], bench):
        fault.killed = not agrees
    return [_figures([fault for fault in faults if fault.trial is trial]) for trial in trials]


def _figures(faults: Sequence[_Fault]) -> dict[str, int]:
    return {
        "mutants": len(faults),
        "killed_visible": sum(fault.seen for fault in faults),
        "killed_all": sum(fault.killed for fault in faults),
    }


def _draw(trial: StrengthTrial, bench: Bench) -> list[tuple[BodyCut, str]]:
    """Faulty bodies of a task's functions, as many as are tried; of very many functions some are looked at."""
    draw = random.Random(trial.salt)  # noqa: S311  a sample, not a secret
    found: dict[int, list[tuple[BodyCut, str]]] = {}
    for number in draw.sample(range(len(trial.cuts)), len(trial.cuts)):
        cut = trial.cuts[number]
        text = bench.original[cut.path].decode()
        found[number] = [(cut, mutant.body) for mutant in mutants_of(text, cut, max_mutants=MAX_MUTANTS)]
        if sum(map(len, found.values())) >= MAX_LOOKED_AT:
            break
    faults = [fault for number in sorted(found) for fault in found[number]]
    return [
        faults[number] for number in sorted(draw.sample(range(len(faults)), min(len(faults), MAX_MUTANTS)))
    ]


def _noticed_by_tests(faults: Sequence[_Fault], view: str, bench: Bench) -> list[tuple[_Fault, bool]]:
    """Whether one of the task's tests of that view fails, for the faults of tasks that have such."""
    asked = [one for one in faults if one.trial.tests(view)]
    seconds = _seconds({id(one.trial): one.trial for one in asked}, view, bench)
    reports = bench.run_all([one.run(view, seconds[id(one.trial)], bench) for one in asked])
    return [
        (one, bool(report.error) or not report.passed.issuperset(one.trial.tests(view)))
        for one, report in zip(asked, reports, strict=True)
    ]


def _seconds(trials: Mapping[int, StrengthTrial], view: str, bench: Bench) -> dict[int, float]:
    """How long the tests may take with a fault: without one they are run first."""
    golden = [
        Trial(one.subject.golden(bench.original, view), one.tests(view), is_golden=True)
        for one in trials.values()
    ]
    return {
        key: bench.noticing_seconds(report.cpu_seconds)
        for key, report in zip(trials, bench.run_all(golden), strict=True)
    }


def _judged_by_twins(faults: Sequence[_Fault], bench: Bench) -> list[tuple[_Fault, bool]]:
    """Whether each fault does what the golden code did, for those of functions whose behaviour is recorded."""
    asked = [one for one in faults if one.cut.pin in one.trial.twins]
    twins = [one.trial.twins[one.cut.pin] for one in asked]
    subjects = list(dict.fromkeys(map(subject_of_twin, twins)))  # several faults share one
    # All jobs work in one tree, so each writes the files anew in which another has its fault.
    whole = {one.cut.path: bench.original[one.cut.path].decode() for one in asked}
    jobs = [
        Job(subjects.index(subject_of_twin(twin)), overlay={**whole, one.cut.path: one.faulty_file(bench)})
        for one, twin in zip(asked, twins, strict=True)
    ]
    reports = play_apart(bench.original, bench.environment, subjects, jobs, backend=bench.backend)
    scores = [
        score_digests(twin, report.digests, report.error) for twin, report in zip(twins, reports, strict=True)
    ]
    return [(one, score.passed) for one, score in zip(asked, scores, strict=True)]
