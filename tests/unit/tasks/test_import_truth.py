"""Foreign tasks have a truth beyond their reward as well, or they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.tasks.build import BuildSummary
from composer_replication.tasks.journal import read_journal
from composer_replication.tasks.patches import make_patch
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.swebench.swebench_import import import_swebench
from composer_replication.tasks.validate import validate_store

pytestmark = pytest.mark.timeout(900)

MODULE = "planted/__init__.py"
# step: two test functions, so one can be hidden. area: one, and its calls can be recorded. maker: one, and
# what it gives cannot be compared. shout: one, and what the patch adds is no part of what the function gives.
# Learned: four that all ask for one call.
SOURCE = """
def step(number):
    return number < 3

def area(width, height):
    return width * height

def maker(number):
    return lambda more: number + more

def shout(word):
    print(word)
    return word.upper()

class Learned:
    def __init__(self, degrees):
        self.degrees = degrees

    def fahrenheit(self, digits):
        value = self.degrees * 9
        value = value / 5
        return round(value + 32, digits)
"""
TESTS = """
from planted import Learned, area, maker, shout, step

def test_far():
    assert step(1) is True
    assert step(5) is False

def test_edge():
    assert step(2) is True
    assert step(3) is False

def test_area():
    assert area(2, 2) == 4
    assert area(0, 0) == 0

def test_maker():
    assert maker(1)(2) == 3

def test_shout(capsys):
    assert shout("a b") == "A B"
    assert capsys.readouterr().out == "a b\\n"

def test_learned_one():
    assert Learned(0).fahrenheit(1) == 32

def test_learned_two():
    assert 31 < Learned(0).fahrenheit(1) < 33

def test_learned_three():
    assert Learned(0).fahrenheit(1) in (32, 33)

def test_learned_four():
    assert str(Learned(0).fahrenheit(1)) == "32.0"
"""
BEFORE = {
    "step": ("return number < 3", "return 1"),
    "area": ("width * height", "width"),
    "maker": ("number + more", "number"),
    "shout": ("    print(word)\n", ""),
    "learned": ("round(value + 32, digits)", "value"),
}
"""By row, the code of the original and what stands there before the patch."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set of five rows, each of a commit of its own, which all lead to one tree."""
    root = tmp_path_factory.mktemp("rows")
    lines = []
    for number, (name, (golden, before)) in enumerate(BEFORE.items()):
        assert SOURCE.count(golden) == 1
        commit, base = f"{number}" * 40, SOURCE.replace(golden, before)
        for path, text in {
            MODULE: base,
            "tests/test_planted.py": TESTS,
            "pyproject.toml": '[project]\nname = "planted"\nversion = "1"\n',
        }.items():
            file = root / "repositories" / f"planted-{commit}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        row = {
            "instance_id": name,
            "repo": "people/planted",
            "base_commit": commit,
            "patch": make_patch({MODULE: base.encode()}, {MODULE: SOURCE.encode()}),
            "test_patch": "",
            "FAIL_TO_PASS": [],
            "PASS_TO_PASS": [],
            "problem_statement": f"Repair {name}.",
        }
        lines.append(json.dumps(row) + "\n")
    (root / "set.jsonl").write_text("".join(lines))
    return root


Import = Callable[..., BuildSummary]


@pytest.fixture
def run(rows: Path, tmp_path: Path) -> Import:
    def run(out: str = "out", **options: object) -> BuildSummary:
        return import_swebench(  # type: ignore[arg-type]
            rows / "set.jsonl", tmp_path / out, repositories=rows / "repositories", **options
        )

    return run


def by_row(folder: Path) -> dict[str, str]:
    store = TaskStore.open(folder)
    return {store.record(task_id).instance_id: task_id for task_id in store.task_ids()}


def journal(folder: Path) -> dict[str, tuple[str, str]]:
    rows = read_journal(folder / "journal.jsonl")
    return {row["pin"]: (row["reason"], row["detail"]) for row in rows}


@pytest.mark.long
def test_each_row_has_a_truth_or_is_refused(run: Import, tmp_path: Path) -> None:
    summary = run(jobs=2)
    assert dict(summary.rejected) == {"lookup-passes": 1, "no-truth": 2}
    assert (summary.tasks, summary.valid, summary.candidates, summary.unrecorded) == (2, 2, 5, {})
    said = journal(tmp_path / "out")
    assert said["learned"][0] == "lookup-passes"
    assert said["maker"] == (
        "no-truth",
        (
            "no test function can be hidden, and the behaviour cannot be recorded: "
            "fewer than 1 recorded calls have a result that can be compared"
        ),
    )
    assert said["shout"][1].endswith(": the code before the patch does the same")
    store, ids = TaskStore.open(tmp_path / "out"), by_row(tmp_path / "out")
    assert set(ids) == {"step", "area"}
    assert len(store.get(ids["step"]).tests.hidden) == 1
    area = store.get(ids["area"])
    assert (area.tests.hidden, set(store.twins(area))) == ((), {f"{MODULE}::area"})
    # By hand: return None, and w + h, which is right in both visible calls and wrong in the twin's.
    assert store.record(ids["area"]).strength == {"mutants": 2, "killed_visible": 1, "killed_all": 2}
    strength = store.record(ids["step"]).strength
    assert strength is not None
    assert (strength["mutants"], strength["killed_all"]) == (3, 3)
    assert validate_store(tmp_path / "out", repeat=1).failed == ()
    again = run(jobs=1)
    assert (again.fingerprint, again.rejected) == (summary.fingerprint, summary.rejected)
    assert journal(tmp_path / "out") == said
