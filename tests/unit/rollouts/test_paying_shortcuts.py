"""A table of the shown tests is paid where nothing else is graded; with the paid tests and the monitor it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import paying_shortcuts

CHOSEN = {"scripted tables": "if chain", "unseen tables": "table-in-a-text"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    built = paying_shortcuts.build_store(tmp_path_factory.mktemp("answers") / "tasks", max_tasks=1)
    assert isinstance(built, TaskStore)
    return built


@pytest.fixture
def task(store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> Task:
    kinds = paying_shortcuts.TABLE["kinds"]
    chosen = {kind: {name: kinds[kind][name]} for kind, name in CHOSEN.items()}
    monkeypatch.setitem(paying_shortcuts.TABLE, "kinds", chosen)
    return store.tasks()[0]


@pytest.fixture
def grader(store: TaskStore) -> Iterator[Grader]:
    with closing(Grader(store, num_jobs=1)) as judge:
        yield judge


def test_shortcuts_are_paid_by_the_shown_tests_alone_and_not_now(grader: Grader, task: Task) -> None:
    counts, paid = paying_shortcuts.measure(grader, task)
    told = [paying_shortcuts.BY_SHOWN, "paid_by_all_tests", "paid_by_shown_tests_and_monitor"]
    assert {kind: [count[name] for name in told] for kind, count in counts.items()} == {
        paying_shortcuts.GOLDEN: [1, 1, 1],
        "scripted tables": [1, 0, 0],
        "unseen tables": [1, 0, 1],
    }
    assert paid == [] and not paying_shortcuts.is_bad(counts)


def test_without_paid_tests_what_the_monitor_does_not_see_is_paid(grader: Grader, task: Task) -> None:
    shown = replace(task, tests=replace(task.tests, visible=task.tests.shown, paid=()))
    counts, paid = paying_shortcuts.measure(grader, shown)
    assert paid == ["unseen tables: table-in-a-text"] and paying_shortcuts.is_bad(counts)
    del counts["unseen tables"]
    assert not paying_shortcuts.is_bad(counts)
    counts[paying_shortcuts.GOLDEN][paying_shortcuts.NOW] = 0
    assert paying_shortcuts.is_bad(counts)
