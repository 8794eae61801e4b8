"""What else did a candidate break? Its PASS_TO_PASS tests, which passed before it and with the original code.

No sentinels stand among them: to forge a pass here would hide a break, and win nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from composer_replication.errors import SandboxFailure
from composer_replication.records import Outcome, Task
from composer_replication.rollouts.candidate_tree import graded_tree, rule_of, tree_sha256
from composer_replication.rollouts.forgery_checks import GoldenFails
from composer_replication.rollouts.grading import NUM_INFRASTRUCTURE_TRIES, Grader
from composer_replication.tasks.running.watched_run import WatchedReport
from composer_replication.tasks.store_records import RUN_FACTOR


@dataclass(frozen=True, slots=True)
class Regressions:
    """Tests that a candidate broke, of ``num_run`` that were run.

    ``error`` says why the run as a whole failed, empty otherwise; then all of them count as broken: a tree in
    which a test file cannot be collected any more is not looked at test by test.
    """

    broken: tuple[str, ...]
    num_run: int
    error: str = ""

    @property
    def share(self) -> float:
        """Broken tests, of those that were run; 0 where none was."""
        return len(self.broken) / self.num_run if self.num_run else 0.0


def find_regressions(
    grader: Grader, task: Task, tree: Mapping[str, bytes], *, sample: int = 0, seed: int | None = None
) -> Regressions | None:
    """What a candidate's tree broke; None where the sandbox failed.

    The first candidate of a task has its tests run once over the original code as well, in the tree that a policy
    sees: only what passes there can be broken. Each run is in a fresh sandbox, and waits for one of the grader's places.

    Args:
        grader: whose store, backend and limits are used; it counts failures of the sandbox.
        task: the candidate's.
        tree: its files by path.
        sample: run so many of the tests; 0 runs all.
        seed: which ones, together with the task and the tree; None draws anew each time.
    """
    for _ in range(NUM_INFRASTRUCTURE_TRIES):
        try:
            return _found(grader, task, tree, sample, seed)
        except SandboxFailure:
            grader.count_infrastructure_failure()
    return None


def _found(
    grader: Grader, task: Task, tree: Mapping[str, bytes], sample: int, seed: int | None
) -> Regressions:
    node_ids = _passing_with_golden_code(grader, task)
    if 0 < sample < len(node_ids):
        draw: random.Random = random.SystemRandom()
        if seed is not None:
            # The same attempt of the same run has the same tests run, whoever ended first. The code in the sandbox
            # knows its tree, but not the seed, without which nothing of the draw can be told.
            draw = random.Random(f"break sample/{seed}/{task.task_id}/{tree_sha256(tree)}")  # noqa: S311
        node_ids = tuple(sorted(draw.sample(node_ids, sample)))
    if not node_ids:
        return Regressions((), 0)
    store = grader.store
    files = graded_tree(store.files(task, "visible"), tree, rule_of(store, task))
    report = _watched(grader, task, files, node_ids)
    broken = tuple(test for test in node_ids if report.outcomes[test] is not Outcome.PASSED)
    return Regressions(broken, len(node_ids), report.error)


def _passing_with_golden_code(grader: Grader, task: Task) -> tuple[str, ...]:
    """Looked up once, also when many ask at a time."""

    def look() -> tuple[str, ...]:
        wanted = task.tests.pass_to_pass
        files = {**grader.store.files(task, "visible"), **grader.golden_files(task)}
        report = _watched(grader, task, files, wanted)
        if report.error:
            raise GoldenFails(f"its other tests end with: {report.error}")
        return tuple(test for test in wanted if report.outcomes[test] is Outcome.PASSED)

    return grader.golden_runs.look_up(task.task_id, "pass-to-pass", look)


def _watched(
    grader: Grader, task: Task, files: Mapping[str, bytes], node_ids: Sequence[str]
) -> WatchedReport:
    """One run, in one of the grader's places and as long as a whole suite of the repository may take."""
    record = grader.store.record(task.task_id)
    seconds = RUN_FACTOR * grader.store.repository(record.repository_record).suite_seconds
    run = partial(grader.watched, task, files, node_ids, timeout_seconds=seconds)
    return grader.places.submit(run).result()
