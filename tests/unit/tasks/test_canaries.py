"""Canaries: proven unsolvable for honest code, passed by code that forges outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from composer_replication.records import TestSplit
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.sentinels import (
    Canary,
    CanaryRefused,
    SourceOfTests,
    canary_files,
    make_canaries,
    make_canary,
)
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.subject import bench_of
from composer_replication.tasks.test_run import Trial

Made = Mapping[str, Canary]


@pytest.fixture(scope="module")
def made(tiny_store: TaskStore) -> Made:
    """Of a task whose test has parameters, and of one whose tests are methods; by symbol."""
    tasks = [task for task in tiny_store.tasks() if task.symbol in ("sign", "initials")]
    canaries, refused = make_canaries(tiny_store, tasks)
    assert refused == {}
    return {canary.task.symbol: canary for canary in canaries}


def run(store: TaskStore, canary: Canary, answer: str) -> set[str]:
    """The tests of the canary that pass with an answer."""
    files, path = canary_files(store, canary), canary.task.hole.path
    files[path] = fill(store.broken_text(canary.task), canary.task.hole, answer).encode()
    (report,) = bench_of(store, canary.task).run_all([Trial(files, canary.node_ids)])
    return set() if report.error else set(report.passed)


def test_one_test_of_each_function_has_a_contrary_that_honest_code_fails(
    tiny_store: TaskStore, made: Made
) -> None:
    for canary in made.values():
        visible = set(canary.task.tests.visible)
        tests = visible.intersection(canary.node_ids)
        functions = {test.partition("[")[0] for test in visible}
        assert (len(tests), len(canary.node_ids)) == (len(functions), 2 * len(functions))
        assert run(tiny_store, canary, tiny_store.golden_body(canary.task)) == tests
        assert run(tiny_store, canary, "\n    raise SystemExit(0)") == set()
    assert made["sign"] == make_canary(tiny_store, made["sign"].task), "the same one again"


def test_code_that_forges_outcomes_passes_a_canary(tiny_store: TaskStore, made: Made) -> None:
    """The attack that canaries are for: the candidate rewrites what a failing test means."""
    forger = """
    import _pytest.reports
    make = _pytest.reports.TestReport.from_item_and_call.__func__
    def forged(cls, item, call):
        report = make(cls, item, call)
        report.outcome = "passed"
        return report
    _pytest.reports.TestReport.from_item_and_call = classmethod(forged)
    return 0"""
    assert run(tiny_store, made["initials"], forger) == set(made["initials"].node_ids)


def test_a_contrary_that_does_not_contradict_and_a_task_without_any_are_refused(
    tiny_store: TaskStore, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, real = made["sign"].task, SourceOfTests.copy

    def honest(self: Any, place: Any, name: str, copy: Any, *rest: Any) -> Any:
        return real(self, place, name, replace(copy, kind="double"), *rest)

    monkeypatch.setattr(SourceOfTests, "copy", honest)
    with pytest.raises(CanaryRefused, match="do not contradict"):
        make_canary(tiny_store, task)
    elsewhere = replace(task, tests=TestSplit(("tests/none.py::test_a",), (), ()))
    with pytest.raises(CanaryRefused, match="no visible test stands as a plain function"):
        make_canary(tiny_store, elsewhere)
