"""The truth of tasks: twins that the golden code proved, strength counted by hand, a build that was killed goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from small_trees import contents

from composer_replication.rollouts.grading import Grader
from composer_replication.run_folder import read_jsonl
from composer_replication.tasks import gates, truth
from composer_replication.tasks.build import BuildSummary, build_tasks
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_run import TestReport, Trial

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PYPROJECT = '[project]\nname = "fields"\nversion = "1"\n'
# area: one test function, so nothing can be hidden, and two visible calls on which a sum is right too.
# step: two test functions. maker: one test function, and what it gives cannot be compared.
SOURCE = """
def area(width, height):
    return width * height

def step(number):
    return number < 3

def maker(number):
    return lambda more: number + more
"""
TESTS = """
from fields import area, maker, step

def test_area():
    assert area(2, 2) == 4
    assert area(0, 0) == 0

def test_far():
    assert step(1) is True
    assert step(5) is False

def test_edge():
    assert step(2) is True
    assert step(3) is False

def test_maker():
    assert maker(1)(2) == 3

def test_nothing():
    pass
"""
FILES = {"pyproject.toml": PYPROJECT, "fields.py": SOURCE, "test_fields.py": TESTS}
FAR, EDGE = "test_fields.py::test_far", "test_fields.py::test_edge"


def write(folder: Path, files: Mapping[str, str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder)


def by_symbol(store: TaskStore) -> dict[str, str]:
    return {task.symbol: task.task_id for task in store.tasks()}


def reasons(folder: Path) -> dict[str, tuple[str, str]]:
    """What was refused, by function: the reason and the detail."""
    rows = read_jsonl(folder / "journal.jsonl")
    return {row["pin"].partition("::")[2]: (row["reason"], row["detail"]) for row in rows if row["reason"]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("source") / "fields", FILES)


@pytest.fixture(scope="module")
def whole(source: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[TaskStore, BuildSummary]:
    """The build that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "out"
    summary = build_tasks([source], out, with_truth=True, jobs=1)
    return TaskStore.open(out), summary


def test_what_gets_which_truth(whole: tuple[TaskStore, BuildSummary]) -> None:
    store, summary = whole
    ids = by_symbol(store)
    assert set(ids) == {"area", "step"}
    assert store.get(ids["area"]).tests.hidden == ()
    assert set(store.twins(store.get(ids["area"]))) == {"fields.py::area"}
    assert {*store.get(ids["step"]).tests.hidden, *store.get(ids["step"]).tests.visible} == {FAR, EDGE}
    assert dict(summary.rejected) == {"no-truth": 1}
    assert reasons(store.root) == {
        "maker": (
            "no-truth",
            (
                "no test function can be hidden, and the behaviour cannot be recorded: "
                "fewer than 1 recorded calls have a result that can be compared"
            ),
        )
    }


def test_the_twin_catches_what_passes_every_visible_test(whole: tuple[TaskStore, BuildSummary]) -> None:
    store, _ = whole
    task = store.get(by_symbol(store)["area"])
    grader = Grader(store, num_jobs=1)
    try:
        found = {}
        for name, body in {"golden": store.golden_body(task), "wrong": "\n    return width + height"}.items():
            scores = grader.grade(task, body), grader.grade(task, body, "hidden")
            found[name] = [score is not None and score.all_passed for score in scores]
    finally:
        grader.close()
    assert found == {"golden": [True, True], "wrong": [True, False]}


def test_strength_is_what_a_person_counts(whole: tuple[TaskStore, BuildSummary]) -> None:
    """Faults by hand.

    area: ``return None`` (every test sees it) and ``width + height`` (right in both visible calls,
    wrong in nearly all of the twin's). step: ``return None``, ``number <= 3`` and ``number < 4``;
    test_far sees the first alone, test_edge all of them, for each answers for 3 with True or None.
    """
    store, _ = whole
    ids = by_symbol(store)
    assert store.record(ids["area"]).strength == {"mutants": 2, "killed_visible": 1, "killed_all": 2}
    killed_visible = {FAR: 1, EDGE: 3}[store.get(ids["step"]).tests.visible[0]]
    expected = {"mutants": 3, "killed_visible": killed_visible, "killed_all": 3}
    assert store.record(ids["step"]).strength == expected


KILLED_WHILE_TWINS_ARE_WRITTEN = """
import os, signal, sys
from composer_replication.tasks import store_manifest as record_folder, truth
from composer_replication.tasks.build import build_tasks
real = truth.twin_bytes
def bomb(twin):
    write = record_folder.write_file
    def once(path, data):
        write(path, data)
        if path.parent.name == "secrets":
            os.kill(os.getpid(), signal.SIGKILL)
    record_folder.write_file = once
    return real(twin)
truth.twin_bytes = bomb
build_tasks([sys.argv[1]], sys.argv[2], with_truth=True, jobs=1)
"""


def test_a_killed_build_goes_on_to_the_same_store(
    whole: tuple[TaskStore, BuildSummary], source: str, tmp_path: Path
) -> None:
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_TWINS_ARE_WRITTEN, source, str(out)],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert reasons(out) == {}
    torn = TaskStore.open(out)
    torn.verify()
    assert all(torn.record(task_id).strength is None for task_id in torn.task_ids())
    summary = build_tasks([source], out, with_truth=True, jobs=1)
    assert summary.fingerprint == whole[0].fingerprint
    assert contents(out) == contents(whole[0].root)


def test_functions_that_are_recorded_apart_have_the_same_twins(
    whole: tuple[TaskStore, BuildSummary], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truth, "FUNCTIONS_A_PART", 1)
    build_tasks([source], tmp_path / "out", with_truth=True, jobs=2)
    assert contents(tmp_path / "out") == contents(whole[0].root)


def test_where_recording_fails_tasks_with_hidden_tests_stay(tmp_path: Path) -> None:
    program = """
import sys
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.twin import twin_run
twin_run.record_calls = lambda *_, **__: ({}, "the recording did not end")
summary = build_tasks([sys.argv[1]], sys.argv[2], with_truth=True, jobs=1)
assert dict(summary.rejected) == {"no-truth": 2}, summary
"""
    source, out = write(tmp_path / "fields", FILES), tmp_path / "out"
    subprocess.run([sys.executable, "-c", program, source, str(out)], check=True)
    store = TaskStore.open(out)
    ids = by_symbol(store)
    assert set(ids) == {"step"}
    assert store.secret(ids["step"]).twins == {}
    assert reasons(out)["area"][1].endswith("the recording did not end")


@pytest.mark.parametrize(
    ("waiting", "reason"), [(2, "not-restored"), (1, "not-restored"), (3, "golden-fails")]
)
def test_golden_code_must_pass_three_times(tmp_path: Path, waiting: int, reason: str) -> None:
    """One of the golden runs fails: the function looks how many runs of the batch, the suite's included, still wait."""
    files = {
        "pyproject.toml": PYPROJECT,
        "fields.py": f"import os\n\n\ndef parity(number):\n    if sorted(os.listdir('../..'))[{waiting}:] == ['run']:\n        return 9\n"
        "    return number % 2\n",
        "test_fields.py": "from fields import parity\n\n\ndef test_parity():\n    assert parity(3) == 1\n    assert parity(4) == 0\n\n\n"
        "def test_nothing():\n    pass\n",
    }
    source = write(tmp_path / "fields", files)
    out = tmp_path / "out"
    summary = build_tasks([source], out, jobs=1)
    assert dict(summary.rejected) == {reason: 1}
    if reason == "not-restored":
        assert "flaky: with the code back the tests pass in 2 of 3 runs" in reasons(out)["parity"][1]


def test_golden_runs_leave_a_candidate_room(tmp_path: Path) -> None:
    """Half of the processor time that an answer has is all that the golden code may need."""
    trials = {"visible": Trial({}, ()), "again 1": Trial({}, ())}
    quick, slow = (TestReport({}, (), "", 1.0, cpu_seconds=seconds) for seconds in (10.0, 10.1))
    gates.check_golden(trials, {"visible": quick, "again 1": quick}, 20.0)
    with pytest.raises(gates.GateFailed, match="golden-fails: the tests need 10 s"):
        gates.check_golden(trials, {"visible": quick, "again 1": slow}, 20.0)
