"""A build of whole removals: what is held back can be met by somebody who has only the tree."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.rollouts.candidate_tree import rule_of
from composer_replication.run_folder import read_jsonl
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.planning.edits import line_edits
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_functions import known_words, remove_functions
from composer_replication.tasks.validate import validate_store

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FILES = {
    "pyproject.toml": '[project]\nname = "shelf"\nversion = "1"\n',
    "shelf/__init__.py": "",
    "shelf/order.py": """
def label(number, *, prefix="no"):
    text = format_number(number)
    return f"{prefix} {text}"

def format_number(number):
    return pad_digits(str(number))

def pad_digits(digits):
    missing = max(0, 4 - len(digits))
    return "0" * missing + digits

def unlabel(text):
    return int(text.split()[-1])
""",
    "tests/test_order.py": """
import pytest

from shelf import order

SECRET_CASES = [(7, "0007"), (12345, "12345")]

def test_label():
    assert order.label(3) == "no 0003"

def test_longer_label():
    assert order.label(33) == "no 0033"

def test_other_label():
    assert order.label(333, prefix="nr") == "nr 0333"

@pytest.mark.parametrize(("number", "text"), SECRET_CASES)
def test_digits(number, text):
    assert order.format_number(number) == text

def test_unlabel():
    assert order.unlabel("no 0003") == 3

def test_unlabel_again():
    assert order.unlabel("no 0004") == 4
""",
    "tests/test_more.py": """
from shelf import order

def test_the_same():
    assert order.unlabel("no 0004") == 4
""",
    "checks/paint.py": "def paint(name):\n    text = name\n    return text.lower()\n",
    "shelf/colour.py": "def red():\n    return 'red'\n",
    "checks/test_colour.py": """
from paint import paint
from shelf.colour import red

def test_red():
    assert red() == paint("Red")

def test_paint():
    assert paint("A") == "a"
""",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf") / "shelf"
    write_tree(folder, FILES)
    return folder


@pytest.fixture(scope="module")
def store(source: Path) -> TaskStore:
    out = source.parent / "tasks"
    sizes = ["function", "feature", "module"]
    build_tasks([str(source)], out, granularities=sizes, removals=["whole"], hidden_share=0.9, jobs=2)
    return TaskStore.open(out)


def test_no_hidden_test_asks_for_a_name_that_nobody_can_know(store: TaskStore) -> None:
    tasks = [task for task in store.tasks() if "test_digits" in " ".join(task.fail_to_pass)]
    assert {"feature", "module"} <= {task.granularity for task in tasks}
    for task in tasks:
        hidden = " ".join(task.tests.unseen)
        known = known_words(store.files(task, "rollout"))
        if task.symbol != "format_number":
            assert "test_digits" not in hidden or "format_number" in known, task.task_id
        if "prefix" not in known:
            assert "test_other_label" not in hidden, task.task_id
        assert "test_unlabel_again" not in hidden, task.task_id  # another file has it word for word


def test_what_lies_among_tests_is_theirs_whatever_their_folder_is_called(store: TaskStore) -> None:
    task = next(iter(store.tasks()))
    repository = store.repository(store.record(task.task_id).repository_record)
    assert repository.folders_of_tests == {"tests", "checks"}
    assert not [one.symbol for one in store.tasks() if one.path.startswith("checks/")]
    pins = {row["pin"].partition("@")[0] for row in read_jsonl(store.root / "journal.jsonl")}
    assert "shelf/colour.py::red" in pins and not any("paint" in pin for pin in pins)
    assert not rule_of(store, task).takes("checks/paint.py") and rule_of(store, task).takes("shelf/colour.py")


def test_validate_knows_an_unfair_and_a_readable_task(store: TaskStore, tmp_path: Path) -> None:
    assert validate_store(store.root, repeat=1).failed == ()
    (task,) = [task for task in store.tasks() if task.granularity == "module" and "order" in task.symbol]
    for name, gate in (("test_digits", "unfair-hidden"), ("test_unlabel_again", "hidden-shown")):
        copy = tmp_path / name
        shutil.copytree(store.root, copy)
        other = TaskStore.open(copy)
        record, secret = other.record(task.task_id), other.secret(task.task_id)
        repository = other.repository(record.repository_record)
        hidden = tuple(test for test in task.fail_to_pass if f"::{name}" in test)
        path, line, _ = repository.places[hidden[0]]
        text = other.blob(repository.files[path]).decode()
        shorter = remove_functions(text, [(line, name)])
        assert shorter is not None
        other.put_task(
            replace(
                record,
                visible=tuple(sorted(set(task.fail_to_pass) - set(hidden))),
                visible_edits=line_edits(path, text, shorter),
                paid_tests=(),
                shown_edits=None,
            ),
            replace(secret, hidden=hidden, withheld=()),
        )
        (failed,) = validate_store(copy, repeat=1).failed
        assert (failed.task_id, failed.gate) == (task.task_id, gate)
