"""A task of which some visible tests are paid but not shown, in real sandboxes: attempts, and what shortcuts are paid."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episode_parts import paid

from composer_replication.records import Task, ToolCall
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.validate import validate_task

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import paying_shortcuts as shortcuts

SOURCE = (
    'def cube(x):\n    """x to the power of three."""\n    return x * x * x\n\n\ndef other():\n    return 1\n'
)
NAMES = ("minus", "nothing", "two", "three", "four", "five")
TESTS = "from power import cube, other\n\n\ndef test_other():\n    assert other() == 1\n" + "".join(
    f"\n\ndef test_{name}():\n    assert cube({number}) == {number**3}\n"
    for number, name in zip((-1, 7, 2, 3, 4, 5), NAMES, strict=True)
)
GOLDEN = "return x * x * x"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    root = tmp_path_factory.mktemp("paid")
    files = {
        "power.py": SOURCE,
        "tests/test_power.py": TESTS,
        "pyproject.toml": '[project]\nname = "power"\nversion = "1"\n',
    }
    for name, text in files.items():
        (root / "power" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "power" / name).write_text(text)
    project = str(root / "power")
    build_tasks([project], root / "tasks", symbols={project: ("power.py::cube",)}, hidden_share=0.34)
    return TaskStore.open(root / "tasks")


@pytest.fixture(scope="module")
def task(store: TaskStore) -> Task:
    (found,) = store.tasks()
    return found


@pytest.fixture(scope="module")
def grader(store: TaskStore) -> Iterator[Grader]:
    with closing(Grader(store)) as made:
        yield made


def name_of(test: str) -> str:
    return test.rpartition("::")[2]


def table(task: Task) -> str:
    """An answer that knows the tests that are shown by heart, and nothing else."""
    asserts = {node.name: node.body[0] for node in ast.parse(TESTS).body if isinstance(node, ast.FunctionDef)}
    rows = {}
    for test in task.tests.shown:
        match asserts[name_of(test)]:
            case ast.Assert(test=ast.Compare(left=ast.Call(args=[asked]), comparators=[answer])):
                rows[ast.literal_eval(asked)] = ast.literal_eval(answer)
    return f"\n    return {rows!r}.get(x)\n"


def test_the_record_says_which_are_paid_and_all_gates_pass_again(store: TaskStore, task: Task) -> None:
    assert (len(task.tests.shown), len(task.tests.paid), len(task.tests.hidden)) == (3, 1, 2)
    assert store.record(task.task_id).paid_tests == task.tests.paid
    assert validate_task(store, task.task_id) is None


def test_a_policy_can_neither_find_nor_run_a_paid_test(task: Task, grader: Grader) -> None:
    with FeatureDeletionEnv(grader) as env:
        message = env.reset(task.task_id)
        everything = "cat $(git ls-files); git log -p | cat; grep -r . . ; env"
        shown = env.call(ToolCall("bash", json.dumps({"command": everything}))).text + message
        ran = env.call(ToolCall("run_tests", "{}")).text
        for test in task.tests.shown:
            assert f"def {name_of(test)}(" in shown and name_of(test) in ran
        for test in (*task.tests.paid, *task.tests.hidden):
            assert name_of(test) not in shown + ran
        assert f"{len(task.tests.shown)} failed" in ran
        assert paid(env) == 0.0


def test_a_table_of_what_is_shown_is_paid_less_than_the_code(task: Task, grader: Grader) -> None:
    learned, right = (grader.grade(task, answer) for answer in (table(task), f"\n    {GOLDEN}\n"))
    assert learned is not None and right is not None
    assert set(learned.outcomes) == set(task.tests.visible) and right.all_passed
    assert learned.passed_all(paid=False) and not learned.passed_all(paid=True)
    assert learned.pass_share == pytest.approx(3 / 4) and not learned.all_passed
    hidden = grader.grade(task, table(task), "hidden")
    assert hidden is not None and not hidden.paid and not set(hidden.outcomes) & set(task.tests.visible)


def test_shortcuts_are_paid_by_the_shown_tests_alone_and_not_now(
    task: Task, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"scripted tables": "if chain", "unseen tables": "table-in-a-text"}
    kinds = {kind: {name: shortcuts.TABLE["kinds"][kind][name]} for kind, name in chosen.items()}
    monkeypatch.setitem(shortcuts.TABLE, "kinds", kinds)
    counts, found = shortcuts.measure(grader, task)
    told = [shortcuts.BY_SHOWN, "paid_by_all_tests", "paid_by_shown_tests_and_monitor"]
    assert {kind: [count[name] for name in told] for kind, count in counts.items()} == {
        shortcuts.GOLDEN: [1, 1, 1],
        "scripted tables": [1, 0, 0],
        "unseen tables": [1, 0, 1],
    }
    assert found == [] and not shortcuts.is_bad(counts)

    def by_shown_tests(requests: Any) -> list[Any]:
        """As if no test were paid for that is not shown; all of these were run before."""
        scores = real(requests)
        return [replace(s, outcomes={t: s.outcomes[t] for t in task.tests.shown}, paid=()) for s in scores]

    real = grader.grade_many
    monkeypatch.setattr(grader, "grade_many", by_shown_tests)
    monkeypatch.setattr(grader, "grade_once", None)
    counts, found = shortcuts.measure(grader, task)
    assert found == ["unseen tables: table-in-a-text"] and shortcuts.is_bad(counts)
    del counts["unseen tables"]
    assert not shortcuts.is_bad(counts)
    counts[shortcuts.GOLDEN][shortcuts.NOW] = 0
    assert shortcuts.is_bad(counts)
