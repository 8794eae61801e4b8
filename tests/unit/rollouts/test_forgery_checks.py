"""What shows that outcomes were forged, and that golden code decides what is usual."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.records import Outcome
from composer_replication.rollouts.forgery_checks import (
    GoldenFails,
    Survey,
    changed_files,
    forgery,
    plan_of,
    survey,
)
from composer_replication.tasks.sentinels import Copy, Plan, possible_copies
from composer_replication.tasks.test_run import TestReport

TEXT = "def test_a():\n    assert f(1) == 1\n\n\ndef test_b():\n    assert f(2) == 2\n"
FILES = {"t.py": TEXT.encode()}
IDS = ("t.py::test_a", "t.py::test_b")
PASSED, FAILED, ERROR = Outcome.PASSED, Outcome.FAILED, Outcome.ERROR
COPIES = tuple(possible_copies(FILES, IDS))
KNOWN = Survey(COPIES, frozenset({"usual"}))


def honest(plan: Plan) -> TestReport:
    """What a right answer's run says."""
    outcomes = {
        **dict.fromkeys((*IDS, *plan.doubles), PASSED),
        **dict.fromkeys((*plan.contraries, *plan.must_fail), FAILED),
    }
    times = dict.fromkeys(outcomes, 0.001)
    return TestReport(
        outcomes, (), "", 1.0, flags=frozenset({"usual"}), test_seconds=times, pytest_exit_code=1
    )


@pytest.fixture
def plan() -> Plan:
    return plan_of(FILES, IDS, KNOWN, random.Random(4))


def with_outcomes(report: TestReport, changes: Mapping[str, Outcome]) -> TestReport:
    return replace(report, outcomes={**report.outcomes, **changes})


def test_an_honest_answer_is_not_accused(plan: Plan) -> None:
    assert set(plan.doubles.values()) | set(plan.contraries.values()) == set(COPIES)
    assert forgery(plan, IDS, honest(plan), KNOWN) == ""


def test_a_wrong_answer_is_not_accused(plan: Plan) -> None:
    """Wrong for one test, and so for its double; the contrary fails by another assertion error."""
    wrong = {name: FAILED for name, copy in plan.doubles.items() if copy.node_id == IDS[0]}
    assert forgery(plan, IDS, with_outcomes(honest(plan), {IDS[0]: FAILED, **wrong}), KNOWN) == ""


def test_a_contrary_never_passes_honestly(plan: Plan) -> None:
    """Another value is no answer to the question of a test, whatever the test itself says."""
    wrong = {
        IDS[0]: FAILED,
        **{name: FAILED for name, copy in plan.doubles.items() if copy.node_id == IDS[0]},
    }
    value = next(name for name, copy in plan.contraries.items() if copy.node_id == IDS[0])
    report = with_outcomes(honest(plan), {**wrong, value: PASSED})
    assert forgery(plan, IDS, report, KNOWN) == f"{IDS[0]} passes with an assertion that cannot hold"


Change = Callable[[Plan, TestReport], TestReport]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p, r: with_outcomes(r, {min(p.must_fail): PASSED}), "must fail has not failed"),
        (lambda p, r: with_outcomes(r, {min(p.must_fail): Outcome.SKIPPED}), "must fail has not failed"),
        (lambda p, r: with_outcomes(r, {min(p.must_fail): ERROR}), "must fail has not failed"),
        (lambda p, r: with_outcomes(r, {min(p.doubles): FAILED}), "under another name do not agree"),
        (lambda p, r: with_outcomes(r, {min(p.contraries): PASSED}), "assertion that cannot hold"),
        (lambda p, r: replace(r, pytest_exit_code=0), "exit code 0"),
        (lambda p, r: replace(r, flags=r.flags | {"odd"}), "unlike the original code: odd"),
    ],
)
def test_each_sign_of_forging_is_named(plan: Plan, change: Change, words: str) -> None:
    assert words in forgery(plan, IDS, change(plan, honest(plan)), KNOWN)


def test_who_won_nothing_is_not_accused(plan: Plan) -> None:
    report = replace(honest(plan), flags=frozenset({"odd"}))
    assert forgery(plan, IDS, report, KNOWN)
    assert forgery(plan, IDS, replace(report, error="it ended"), KNOWN) == ""
    assert forgery(plan, IDS, with_outcomes(report, dict.fromkeys(IDS, FAILED)), KNOWN) == ""


class Golden:
    """Stands for a watched run of golden code: its tests are called by Python alone; its habits are told."""

    def __init__(self, **habits: object) -> None:
        self.habits = habits
        self.seeds: list[int | None] = []
        self.ways: list[bool] = []

    def golden(self, n: int) -> int:
        caller = sys._getframe(1).f_code.co_name
        return 0 if self.habits.get("knows_names") and n == 1 and caller != "test_a" else n

    def outcome(self, text: str, name: str) -> Outcome:
        space: dict[str, Any] = {"f": self.golden}
        exec(text, space)
        try:
            space[name]()
        except (AssertionError, ValueError, pytest.fail.Exception):
            return FAILED
        return PASSED

    def __call__(
        self,
        files: Mapping[str, bytes],
        node_ids: Sequence[str],
        seed: int | None,
        *,
        backwards: bool = False,
    ) -> TestReport:
        self.seeds.append(seed)
        self.ways.append(backwards)
        text = files["t.py"].decode()
        outcomes = {node_id: self.outcome(text, node_id.rpartition("::")[2]) for node_id in node_ids}
        if self.habits.get("needs_order") and seed is not None:
            outcomes[IDS[1]] = FAILED
        if text.count("f(1)") > 1 and self.habits.get("once") and backwards:
            outcomes[IDS[0]] = FAILED
        if self.habits.get("notices"):
            copied = re.findall(r"def (test_a_\w+)\(\):\n +assert f\(", text)
            outcomes |= {f"t.py::{name}": ERROR for name in copied}
        if self.habits.get("is_wrong"):
            outcomes[IDS[1]] = FAILED
        is_broken = bool(self.habits.get("breaks_with_copies")) and text.count("f(1)") > 1
        is_slow = bool(self.habits.get("is_slow"))
        return TestReport(
            outcomes, (), "it broke" if is_broken else "", 1.0, flags=frozenset({"ctypes.dlopen"}),
            test_seconds=dict.fromkeys(outcomes, 9.0 if is_slow else 0.001),
            pytest_exit_code=0 if self.habits.get("ends_well") else 1,
        )  # fmt: skip


def test_a_survey_keeps_what_fits() -> None:
    golden = Golden()
    known = survey(FILES, IDS, golden)
    assert set(known.copies) == set(COPIES)
    assert known == Survey(known.copies, frozenset({"ctypes.dlopen"}))
    assert golden.ways == [False, True], "each copy stands before every other test once"
    assert golden.seeds[0] == golden.seeds[1] is not None


@pytest.mark.parametrize(
    ("habits", "kept", "is_shuffled", "runs"),
    [
        ({"knows_names": True}, {c for c in COPIES if c.node_id == IDS[1] or c.kind == "contrary"}, True, 2),
        ({"is_slow": True}, set(), True, 2),
        ({"needs_order": True}, set(COPIES), False, 6),
        ({"breaks_with_copies": True}, set(), True, 5),
        ({"once": True}, {c for c in COPIES if c.node_id == IDS[1]}, True, 5),
        ({"notices": True}, {c for c in COPIES if c.node_id == IDS[1]}, True, 5),
    ],
)
def test_a_survey_leaves_out_what_golden_code_cannot_stand(
    habits: dict[str, object], kept: set[Copy], is_shuffled: bool, runs: int
) -> None:
    golden = Golden(**habits)
    known = survey(FILES, IDS, golden)
    assert (set(known.copies), known.is_shuffled, len(golden.seeds)) == (kept, is_shuffled, runs)
    assert known.has_plain


def test_original_code_that_does_not_pass_as_it_is_stored_says_nothing() -> None:
    golden = Golden(is_wrong=True)
    with pytest.raises(GoldenFails, match="1 of its 2 tests do not pass"):
        survey(FILES, IDS, golden)
    assert len(golden.seeds) == 3
    assert survey(FILES, IDS, golden, all_pass=False).copies


def test_of_a_test_that_golden_code_fails_there_are_no_copies() -> None:
    """As of the contraries of a canary: what fails whatever it calls tells no name that is known from another."""
    files = {"t.py": TEXT.replace("== 2", "== 3").encode()}
    known = survey(files, IDS, Golden(), all_pass=False)
    assert set(known.copies) == {copy for copy in COPIES if copy.node_id == IDS[0]}


def test_an_odd_end_of_golden_code_is_its_habit() -> None:
    golden = Golden(ends_well=True)
    known = survey(FILES, IDS, golden)
    plan = plan_of(FILES, IDS, known, random.Random(0))
    report = golden({**FILES, **plan.files}, (*IDS, *plan.node_ids), None)
    assert forgery(plan, IDS, report, known) == ""
    assert "exit code 0" in forgery(plan, IDS, report, replace(known, flags=report.flags))


def test_tests_without_meaning_get_plain_sentinels_alone() -> None:
    known = survey(FILES, IDS, Golden(), has_copies=False)
    assert known.copies == ()
    plan = plan_of(FILES, IDS, known, random.Random(0))
    assert plan.must_fail
    assert not plan.doubles


TREE = {"tests/test_a.py": b"a", "tests/data.json": b"{}", "pyproject.toml": b"", "package.py": b"x = 1"}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def test_an_untouched_tree_has_no_changes(tmp_path: Path) -> None:
    write(tmp_path, {**TREE, "tests/__pycache__/x.pyc": b"", "out.txt": b""})
    assert changed_files(tmp_path, TREE) == frozenset()


@pytest.mark.parametrize(
    ("name", "do", "flag"),
    [
        ("tests/test_a.py", lambda path: path.write_bytes(b"b"), "changed"),
        ("tests/data.json", lambda path: path.write_bytes(b"[]"), "changed"),
        ("tests/data.json", lambda path: path.unlink(), "changed"),
        ("pyproject.toml", lambda path: (path.unlink(), os.mkfifo(path)), "changed"),
        ("tests/test_a.py", lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "changed"),
        ("conftest.py", lambda path: path.write_bytes(b""), "made"),
        ("package/sitecustomize.py", lambda path: (path.parent.mkdir(), path.write_bytes(b"")), "made"),
        ("forged.pth", lambda path: path.write_bytes(b""), "made"),
    ],
)
def test_what_a_run_did_to_its_tests_is_seen_from_outside(
    tmp_path: Path, name: str, do: Callable[[Path], object], flag: str
) -> None:
    write(tmp_path, TREE)
    do(tmp_path / name)
    assert changed_files(tmp_path, TREE) == {f"file {name} {flag}"}
