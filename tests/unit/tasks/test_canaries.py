"""Canaries: proven unsolvable for honest code, passed by code that forges outcomes."""

from __future__ import annotations

import re

import pytest
from small_trees import write_tree

from composer_replication.tasks import sentinels as module
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.gates import Bench
from composer_replication.tasks.planning.body_cuts import fill
from composer_replication.tasks.repository import make_bench
from composer_replication.tasks.sentinels import (
    Canary,
    CanaryRefused,
    canary_files,
    make_canary,
)
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_run import Trial

TESTS = '''"""Doc
string."""
from __future__ import annotations
import unittest
import pytest
from planted import double

@pytest.mark.parametrize("x", [1, 2])
def test_double(x):
    """A body whose text

    must not be moved."""
    assert double(x) == 2 * x

class TestMethods(unittest.TestCase):
    def setUp(self):
        self.x = 3

    def test_method(self):
        self.assertEqual(double(self.x), 6)

@pytest.fixture
def seven():
    return 7

async def helper():
    pass

def test_fixture(seven):
    if double(seven) != 14: pytest.fail("no")
def test_neighbour(): assert True'''


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> TaskStore:
    """A store of one task, to be read only."""
    root = tmp_path_factory.mktemp("canaries")
    files = {
        "pyproject.toml": '[project]\nname = "planted"\nversion = "1.0"\n',
        "planted.py": "def double(x):\n    y = x + x\n    return y\n",
        "tests/test_planted.py": TESTS,
    }
    write_tree(root / "planted", files)
    build_tasks([str(root / "planted")], root / "store", hidden_share=0.0).require_tasks()
    return TaskStore.open(root / "store")


@pytest.fixture(scope="module")
def canary(planted: TaskStore) -> Canary:
    (task,) = planted.tasks()
    return make_canary(planted, task)


def run(store: TaskStore, canary: Canary, answer: str) -> set[str]:
    """The tests of the canary that pass with an answer."""
    slug = store.record(canary.task.task_id).repository_record
    bench: Bench = make_bench(store.repository_files(slug), store.environment(canary.task), None)
    files = canary_files(store, canary)
    path = canary.task.hole.path
    files[path] = fill(store.broken_text(canary.task), canary.task.hole, answer).encode()
    (report,) = bench.run_all([Trial(files, canary.node_ids)])
    return set() if report.error else set(report.passed)


@pytest.mark.long
def test_functions_methods_parameters_and_fixtures_get_a_twin(planted: TaskStore, canary: Canary) -> None:
    (task,) = planted.tasks()
    names = {re.sub(r".*::", "", node_id) for node_id in canary.node_ids}
    tests = {"test_double[1]", "test_double[2]", "test_method", "test_fixture"}
    twins = {
        "test_double_contradicted[1]",
        "test_double_contradicted[2]",
        "test_method_contradicted",
        "test_fixture_contradicted",
    }
    assert names == tests | twins
    golden = {re.sub(r".*::", "", n) for n in run(planted, canary, planted.golden_body(task))}
    assert golden == tests
    wrong = {re.sub(r".*::", "", n) for n in run(planted, canary, "\n    return 2 * x + 1")}
    assert wrong == twins


def test_code_that_forges_outcomes_passes_a_canary(planted: TaskStore, canary: Canary) -> None:
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
    passed = run(planted, canary, forger)
    assert passed == set(canary.node_ids)


def test_the_original_test_files_stay_as_they_were(canary: Canary) -> None:
    (path,) = canary.test_files
    added = canary.test_files[path].decode()
    rest = iter(added.splitlines())
    missing = [line for line in TESTS.splitlines() if line and line not in rest]  # each after the one before
    assert missing == []
    assert len(added.splitlines()) > len(TESTS.splitlines())


def test_a_twin_that_does_not_contradict_is_refused(planted: TaskStore, monkeypatch) -> None:
    (task,) = planted.tasks()
    monkeypatch.setattr(module, "_TWIN_MAKER", "\ndef _contradict(test):\n    return test\n")
    with pytest.raises(CanaryRefused, match="do not contradict"):
        make_canary(planted, task)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("def test_a(): pass; x = 1", "test_a"),  # body on one line, and no line after it, is fine
        ("def test_a():\n    pass\n", "test_a"),
        ("class T:\n  def test_a(self): pass\n", "T::test_a"),
    ],
)
def test_places(text: str, name: str) -> None:
    files, twins = module._files_with_twins({"t.py": text.encode()}, [f"t.py::{name}"])
    assert twins == {f"t.py::{name}": f"t.py::{name}_contradicted"}
    exec(compile(files["t.py"], "x", "exec"), {})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("async def test_a(): pass\n", "test_a"),
        ("if True:\n    def test_a(): pass\n", "test_a"),
        ("def test_a(): pass\ndef test_a(): pass\n", "test_a"),
        ("class T: pass\n", "T::test_a"),
        ("test_a = 1\n", "test_a"),
    ],
)
def test_no_place(text: str, name: str) -> None:
    assert module._files_with_twins({"t.py": text.encode()}, [f"t.py::{name}"]) == ({}, {})
