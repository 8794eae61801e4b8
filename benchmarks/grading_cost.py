"""What do sentinels and watching cost in one grading?

    python benchmarks/grading_cost.py [--repeats 20] [--store FOLDER] [--tasks 5]

Without ``--store`` it builds the planted task of ``forgeries.py``. Grades the golden answer of each
task by turns: once as the plain test run that golden code has in a build (``run_tests``: fresh
sandbox, same tests, nothing added) and once as an answer is graded. Prints for each the median
seconds by the clock, and what the first grading takes, with the survey that is made once for each task and run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from forgeries import build_store

from composer_replication.records import Task
from composer_replication.rollouts.grading import WALL_FACTOR, Grader, GradeRequest
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_run import run_tests
from composer_replication.tasks.views import write_files


def plain(store: TaskStore, task: Task, answer: str) -> None:
    """The run without sentinels, unwatched."""
    files = store.files(task, "visible")
    files[task.hole.path] = fill(store.broken_text(task), task.hole, answer).encode()
    with tempfile.TemporaryDirectory(prefix="cost-", dir=process_folder()) as folder:
        tree = Path(folder) / "tree"
        write_files(tree, files)
        report = run_tests(
            tree, store.environment(task), task.tests.visible, timeout_seconds=20.0, wall_factor=WALL_FACTOR
        )
    if report.error or len(report.passed) != len(task.tests.visible):
        raise SystemExit(f"{task.task_id}: the golden code does not pass: {report.error}")


def measured(work: Callable[[], object]) -> float:
    """Seconds by the clock."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def watched(grader: Grader, task: Task, answer: str) -> None:
    """One grading."""
    score = grader.grade_many([GradeRequest(task, answer)], afresh=True)[0]
    if score is None or not score.all_passed:
        raise SystemExit(f"{task.task_id}: the golden answer fails: {score and score.error}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--tasks", type=int, default=5, help="at most so many of the store")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grading-cost-") as folder:
        store = TaskStore.open(chosen.store) if chosen.store else build_store(Path(folder), with_truth=False)
        grader = Grader(store, num_jobs=1)
        try:
            print(f"{'task':<44} {'tests':>5}  {'plain':>8}  {'graded':>8}  {'first':>8}   seconds")
            for task in store.tasks()[: chosen.tasks]:
                answer = store.golden_body(task)
                first = measured(partial(watched, grader, task, answer))
                pairs = [
                    (
                        measured(partial(plain, store, task, answer)),
                        measured(partial(watched, grader, task, answer)),
                    )
                    for _ in range(chosen.repeats)
                ]
                before, after = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
                print(
                    f"{task.task_id[:44]:<44} {len(task.tests.visible):>5}  {before:>8.3f}  {after:>8.3f}  {first:>8.3f}",
                    flush=True,
                )
        finally:
            grader.close()


if __name__ == "__main__":
    main()
