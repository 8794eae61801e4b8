"""Canaries: not to be solved by honest code, passed by code that forges outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from scripted_policy import FORGER

from composer_replication.records import TestSplit
from composer_replication.tasks.gates import bench_of
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.sentinels import Canary, make_canary
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_run import Trial

Made = Mapping[str, Canary]


@pytest.fixture(scope="module")
def made(tiny_store: TaskStore) -> Made:
    """Of a task whose test has parameters, and of one whose tests are methods; by symbol."""
    tasks = [task for task in tiny_store.tasks() if task.symbol in ("sign", "initials")]
    return {task.symbol: canary for task in tasks if (canary := make_canary(tiny_store, task))}


def run(store: TaskStore, canary: Canary, answer: str) -> set[str]:
    """The tests of the canary that pass with an answer."""
    files, path = {**store.files(canary.task, "visible"), **canary.test_files}, canary.task.hole.path
    files[path] = fill(store.broken_text(canary.task), canary.task.hole, answer).encode()
    (report,) = bench_of(store, canary.task).run_all([Trial(files, canary.node_ids)])
    return set() if report.error else set(report.passed)


def test_tests_that_honest_code_fails_stand_beside_one_of_each_function(
    tiny_store: TaskStore, made: Made
) -> None:
    for canary in made.values():
        visible = set(canary.task.tests.visible)
        tests = visible.intersection(canary.node_ids)
        assert len(tests) == len({test.partition("[")[0] for test in visible})
        assert len(canary.node_ids) > len(tests)
        assert run(tiny_store, canary, tiny_store.golden_body(canary.task)) == tests
        assert run(tiny_store, canary, "\n    raise SystemExit(0)") == set()
    assert made["sign"] == make_canary(tiny_store, made["sign"].task), "the same one again"


def test_code_that_forges_outcomes_passes_a_canary(tiny_store: TaskStore, made: Made) -> None:
    """The attack that canaries are for: the candidate rewrites what a failing test means."""
    assert run(tiny_store, made["initials"], FORGER) == set(made["initials"].node_ids)


def test_a_task_without_a_readable_test_file_is_refused(tiny_store: TaskStore, made: Made) -> None:
    elsewhere = replace(made["sign"].task, tests=TestSplit(("tests/none.py::test_a",), (), ()))
    assert make_canary(tiny_store, elsewhere) is None
