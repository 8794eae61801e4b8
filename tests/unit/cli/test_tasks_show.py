"""``tasks show`` and ``tasks stats`` for every size: what is shown, and how wide."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from composer_replication.cli.tasks_verb import render_show, run_show, run_stats
from composer_replication.cli.terminal import columns
from composer_replication.tasks.difficulty import Difficulty, MeasuredPolicy, record_difficulty
from composer_replication.tasks.instructions import WrittenInstruction
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.store import TaskStore

POLICY = MeasuredPolicy("small", "a" * 64, 0.8, "completion", 12, 64)
GOLDEN = ("return min(x, high)", "self.x * other.x", "** 0.5", "text.upper()", "letters[::-1]", "self.x = x")


def asked(store: TaskStore, task_id: str | None) -> argparse.Namespace:
    return argparse.Namespace(folder=store.root, task_id=task_id, golden=False, quiet=True)


def page(store: TaskStore, task_id: str) -> dict[str, Any]:
    result, code = run_show(asked(store, task_id))
    assert code == 0
    json.dumps(result, allow_nan=False)
    return result["tasks"][0]  # type: ignore[index]


def render_task(row: dict[str, Any]) -> str:
    return render_show({"tasks": [row]})


def test_the_page_of_every_size_tells_nothing(sized_store: TaskStore) -> None:
    for task in sized_store.tasks():
        row = page(sized_store, task.task_id)
        text = render_task(row)
        for shown in (text, json.dumps(row)):
            assert not any(line in shown for line in GOLDEN), task.task_id
            assert not any(f"{test.rpartition('::')[2]}(" in shown for test in task.tests.hidden)
            assert not any(f'"{test}"' in shown for test in task.tests.hidden)
        hidden = set(task.tests.hidden) - set(task.tests.visible)
        named = {word.strip(",") for word in text.split()}
        assert not hidden & named
        assert set(task.tests.visible) <= named


def test_facts_of_a_removed_module(sized_store: TaskStore) -> None:
    row = page(sized_store, "t-module-whole")
    assert (row["line"], row["files"]) == (None, ["tinymath/__init__.py", "tinymath/text.py"])
    lines = render_task(row).splitlines()
    assert f"{'path':<19} tinymath/text.py" in lines
    assert f"{'files':<19} tinymath/__init__.py, tinymath/text.py" in lines
    assert f"{'num body lines':<19} 9" in lines


def test_where_each_begins(sized_store: TaskStore) -> None:
    lines = {task.task_id: page(sized_store, task.task_id)["line"] for task in sized_store.tasks()}
    assert lines == {
        "t-function-body": 28, "t-class-body": 8, "t-module-body": 6, "t-feature-body": 28, "t-function-whole": 26,
        "t-method-whole": 18, "t-class-whole": 2, "t-module-whole": None, "t-feature-whole": 26,
    }  # fmt: skip


def test_recorded_behaviour_is_shown_and_counted(sized_store: TaskStore) -> None:
    assert f"{'num recorded':<19} 0" in render_task(page(sized_store, "t-class-body")).splitlines()
    record, secret = sized_store.record("t-class-body"), sized_store.secret("t-class-body")
    sized_store.put_task(record, replace(secret, twins={"a.py::f": "0" * 64, "a.py::g": "1" * 64}))
    row = page(sized_store, "t-class-body")
    assert row["num_recorded"] == 2
    assert f"{'num recorded':<19} 2" in render_task(row).splitlines()
    stats, _ = run_stats(argparse.Namespace(folder=sized_store.root))
    assert stats["recorded"] == 1
    assert stats["hidden"] == 4


def test_difficulty_is_shown(sized_store: TaskStore) -> None:
    assert page(sized_store, "t-class-body")["difficulty"] == []
    rows = [Difficulty("t-class-body", POLICY, 10, 8, 5), Difficulty("t-module-body", POLICY, 10, 0, None)]
    record_difficulty(sized_store.root, 0, [*rows, Difficulty("of an older store", POLICY, 2, 2, None)])
    shown = page(sized_store, "t-class-body")
    assert shown["difficulty"][0]["pass_rate"] == 0.8
    text = " ".join(render_task(shown).split())
    assert "policy name small, " in text
    assert "num_samples 10, num_passed 8, num_hidden_passed 5, pass_rate 0.8, ci95 0.49" in text


def test_counts(sized_store: TaskStore) -> None:
    stats, _ = run_stats(argparse.Namespace(folder=sized_store.root))
    assert stats["tasks"] == 9
    assert stats["by_repo"] == {"tinymath==1.0": 9}
    assert stats["by_granularity"] == {"class": 2, "feature": 2, "function": 3, "module": 2}
    assert stats["by_removal"] == {"body": 4, "whole": 5}
    assert stats["fail_to_pass"] == 3 + 3 + 2 + 3 + 3 + 2 + 2 + 2 + 3
    assert stats["hidden"] == 4
    assert stats["licences"] == {"tinymath==1.0": Licence(None, "", "", None).to_json()}
    assert "by granularity      class 2, feature 2, function 3, module 2\n" in columns(stats)
    assert "by removal          body 4, whole 5\n" in columns(stats)
    assert "restricted licences tinymath==1.0 licence not known\n" in columns(stats)


def test_tests_that_are_paid_but_not_shown_are_named(sized_store: TaskStore) -> None:
    record = sized_store.record("t-feature-body")
    paid = record.visible[:1]
    sized_store.put_task(
        replace(record, paid_tests=paid, shown_edits=()), sized_store.secret("t-feature-body")
    )
    result, _ = run_show(asked(sized_store, "t-feature-body"))
    assert result["tasks"][0]["paid_tests"] == list(paid)
    page = render_show(result)
    assert f"\n{'paid tests':<19} {paid[0]}\n" in page


def test_a_written_instruction_is_shown_beside_the_plain_one(sized_store: TaskStore) -> None:
    written = WrittenInstruction("t-class-body", "some-model", f"# Vector\n\n{'Words of `Vector`. ' * 20}\n")
    sized_store.put_record("instructions/t-class-body.json", written.to_json())
    row = page(sized_store, "t-class-body")
    assert row["written_instruction"] == {"model": "some-model", "text": written.text}
    lines = render_task(row).splitlines()
    assert "instruction" in lines
    at = lines.index("written instruction")
    assert lines[at + 1 : at + 3] == ["  model: some-model", "  text: # Vector"]
    assert page(sized_store, "t-class-whole")["written_instruction"] is None
