"""Each gate rejects what was planted for it, and only that."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.records import Edit, TestSplit
from composer_replication.tasks.gates import (
    GateFailed,
    Subject,
    check_restores,
    judge_deletion,
    prove,
    suite_trial,
)
from composer_replication.tasks.intake.sources import open_source
from composer_replication.tasks.leaks.shown_code import copied_share
from composer_replication.tasks.repository import PreparedRepository, prepare
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord

PACKAGE = """
STATE = []

def at_import():
    return 5

CONSTANT = at_import()

def in_conftest():
    return 6

def crashes_without():
    return 1

def waits_without():
    return 1

def unnoticed():
    return 1

def copied(x):
    y = x + 1
    return y * 2

def falsy():
    return 0

def behind_state():
    return "state"

def needs_company():
    return "company"

def counted():
    return "counted"

def fine(x):
    return x + 40

def gives_a_word():
    return "word"
"""
OTHER = "def other(z):\n    # the same lines\n    y = x + 1\n\n    return y * 2\n"
TESTS = """
import os
import sys
import threading

import planted

def test_a_sets_state():
    planted.STATE.append(1)

def test_crashes():
    try:
        planted.crashes_without()
    except NotImplementedError:
        os._exit(3)

def test_waits():
    try:
        planted.waits_without()
    except NotImplementedError:
        threading.Event().wait()

def test_copied():
    assert planted.copied(1) == 4

def test_falsy():
    assert not planted.falsy()

def test_behind_state():
    if planted.STATE:
        assert planted.behind_state() == "state"

def test_needs_company():
    assert "test_counted" in sys.modules  # in any order, but not alone
    assert planted.needs_company() == "company"

def test_fine_one():
    assert planted.fine(1) == 41

def test_fine_two():
    assert planted.fine(2) == 42

def test_ends_the_run():
    if planted.gives_a_word() != "word":
        os._exit(3)

def test_asks_for_anything():
    planted.gives_a_word()
"""
COUNTED = """
import planted

def test_counted_one():
    assert planted.counted() == "counted"

def test_counted_two():
    assert planted.counted() == "counted"

assert len([name for name in globals() if name.startswith("test_")]) == 2
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> PreparedRepository:
    root = tmp_path_factory.mktemp("gates")
    files = {
        "pyproject.toml": '[project]\nname = "planted"\nversion = "1.0"\n',
        "planted.py": PACKAGE,
        "other.py": OTHER,
        "tests/test_all.py": TESTS,
        "tests/test_counted.py": COUNTED,
        "tests/conftest.py": "import planted\n\nSIX = planted.in_conftest()\n",
    }
    write_tree(root / "project", files)
    source = open_source(str(root / "project"))
    return prepare(source, TaskStore.create(root / "store"))


def judge(planted: PreparedRepository, name: str, seed: int = 0) -> Subject:
    deletion = planted.by_pin(f"planted.py::{name}")
    assert deletion is not None
    return judge_deletion(deletion, planted.record, planted.bench, hidden_share=0.5, seed=seed)


@pytest.fixture(scope="module")
def fine(planted: PreparedRepository) -> Subject:
    return judge(planted, "fine")


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("at_import", "breaks-import"),
        ("in_conftest", "breaks-import"),
        ("crashes_without", "broken-run-fails"),
        pytest.param(
            "waits_without", "broken-run-fails", marks=pytest.mark.long
        ),  # ten seconds, not the suite's
        ("unnoticed", "no-failing-test"),
        ("copied", "golden-copy"),
        ("falsy", "stub-passes"),
        ("behind_state", "broken-passes"),
        ("needs_company", "golden-fails"),
    ],
)
def test_each_gate_rejects_what_was_planted_for_it(planted: PreparedRepository, name: str, gate: str) -> None:
    with pytest.raises(GateFailed) as caught:
        judge(planted, name)
    assert caught.value.reason == gate
    assert caught.value.detail


def test_a_good_candidate_passes_all(planted: PreparedRepository, fine: Subject) -> None:
    subject = fine
    assert len(subject.tests.visible) == len(subject.tests.hidden) == 1
    assert set(subject.tests.visible) | set(subject.tests.hidden) == {
        "tests/test_all.py::test_fine_one",
        "tests/test_all.py::test_fine_two",
    }
    hidden_name = subject.tests.hidden[0].rpartition("::")[2]
    assert hidden_name not in subject.broken(planted.bench.original, "rollout")["tests/test_all.py"].decode()


def _check_own(planted: PreparedRepository, subject: Subject, bench: Bench) -> None:
    """The gates of the task's own tests, as if its repository had no others."""
    own = (*subject.tests.visible, *subject.tests.hidden)
    record = replace(
        planted.record,
        places={test: planted.record.places[test] for test in own if test in planted.record.places},
    )
    (suite,) = bench.run_all([suite_trial(subject, bench)])
    prove(subject, record, bench, suite=suite)


@pytest.mark.long
def test_a_file_that_cannot_be_parted_hides_nothing(planted: PreparedRepository) -> None:
    subject = judge(planted, "counted")  # its file counts its own tests
    assert (len(subject.tests.visible), subject.tests.hidden) == (2, ())


@pytest.mark.long
def test_a_constant_that_ends_the_run_of_all_tests_is_tried_on_each_side(planted: PreparedRepository) -> None:
    subject = judge(planted, "gives_a_word")  # one test asks nothing of it, and may be no side of its own
    assert (len(subject.tests.visible), subject.tests.hidden) == (2, ())
    parted = replace(subject, tests=TestSplit(subject.tests.visible[:1], subject.tests.visible[1:], ()))
    with pytest.raises(GateFailed, match=r"stub-passes: the \w+ tests pass with return None"):
        _check_own(planted, parted, planted.bench)


def test_the_functions_that_tests_call_are_known(planted: PreparedRepository) -> None:
    fine, unnoticed = planted.by_pin("planted.py::fine"), planted.by_pin("planted.py::unnoticed")
    assert fine is not None
    assert unnoticed is not None
    shares = [planted.record.called_share(deletion) for deletion in (fine, unnoticed)]
    assert shares == [1.0, 0.0]
    again = RepositoryRecord.from_json(json.loads(json.dumps(planted.record.to_json())))
    assert again == planted.record
    unknown = replace(planted.record, called=None)
    assert unknown.called_share(unnoticed) == 1.0
    assert RepositoryRecord.from_json(json.loads(json.dumps(unknown.to_json()))) == unknown
    old = {**planted.record.to_json(), "contexts": {"form": 1}}
    del old["called"]
    assert RepositoryRecord.from_json(old) == unknown


@pytest.mark.long
def test_a_function_behind_everything_is_no_task(
    make_project: Callable[[Mapping[str, str]], Path], tmp_path: Path
) -> None:
    root = make_project(
        {
            "one.py": "def one():\n    return 1\n",
            "test_one.py": "import one\n\n\ndef test_a():\n    assert one.one() == 1\n\n\ndef test_b():\n    assert one.one() < 2\n",
        }
    )
    prepared = prepare(open_source(str(root)), TaskStore.create(tmp_path / "store"))
    deletion = prepared.by_pin("one.py::one")
    assert deletion is not None
    with pytest.raises(GateFailed, match="breaks-everything"):
        judge_deletion(deletion, prepared.record, prepared.bench, hidden_share=0.5, seed=0)


def test_edits_that_leave_their_file_do_not_restore(planted: PreparedRepository, fine: Subject) -> None:
    outside = replace(fine.changes, edits=(*fine.changes.edits, Edit("planted.py", 5, 10_000, "")))
    with pytest.raises(GateFailed, match="not-restored"):
        check_restores(replace(fine, changes=outside), planted.bench.original)
    absent = replace(fine.changes, removed_files=("absent.py",))
    with pytest.raises(GateFailed, match="not-restored"):
        check_restores(replace(fine, changes=absent), planted.bench.original)


def test_wrong_golden_code_fails_its_tests(planted: PreparedRepository, fine: Subject) -> None:
    wrong = planted.bench.original["planted.py"].replace(b"x + 40", b"x + 41")
    bench = replace(planted.bench, original={**planted.bench.original, "planted.py": wrong})
    with pytest.raises(GateFailed, match="golden-fails"):
        _check_own(planted, fine, bench)


def test_a_hidden_test_that_fails_alone_is_found(planted: PreparedRepository, fine: Subject) -> None:
    subject = replace(fine, tests=replace(fine.tests, hidden=("tests/test_all.py::test_needs_company",)))
    with pytest.raises(GateFailed, match="golden-fails: a hidden test does not pass") as caught:
        _check_own(planted, subject, planted.bench)
    assert "test_needs_company" not in str(caught.value)


@pytest.mark.long
def test_a_task_whose_tests_ask_nothing_of_the_code_is_refused(
    planted: PreparedRepository, fine: Subject
) -> None:
    subject = replace(fine, tests=replace(fine.tests, visible=("tests/test_all.py::test_a_sets_state",)))
    with pytest.raises(GateFailed, match="broken-passes"):
        _check_own(planted, subject, planted.bench)
    with pytest.raises(GateFailed, match="broken-passes: the hidden tests"):
        _check_own(
            planted,
            replace(fine, tests=replace(fine.tests, hidden=("tests/test_all.py::test_a_sets_state",))),
            planted.bench,
        )


def test_a_copy_is_found_behind_indentation_and_comments() -> None:
    golden = ["\n    y = x + 1\n    return y"]
    indented = {"a.py": b"class A:\n\tdef f():\n\t\ty = x + 1\n\n\t\t# why\n\t\treturn y\n"}
    assert copied_share(golden, indented) == (1.0, "a.py")
    assert copied_share(golden, {"a.txt": b"y = x + 1\nreturn y"}) == (1.0, "a.txt")
    assert copied_share(golden, {"a.py": b"y = x + 1\nz = 1\nreturn y\n"}) == (0.0, "")
    assert copied_share(golden, {"a.py": b"y = x + 12\nreturn y\n"}) == (0.0, "")
    assert copied_share(["\n    return y"], {"a.py": b"return y\n"}) == (0.0, "")
    assert copied_share([*golden, "a = 1\nb = 2\nc = 3"], indented) == (0.4, "a.py")
