"""Forged outcomes are not paid for, honest answers are: real runs in real sandboxes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from composer_replication.records import Task
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.tasks.store import TaskStore

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SHOWN = tuple(
    f"tests/{path}::{name}"
    for path, names in {
        "later/test_later.py": "test_too_large test_negative test_later_tens test_later_hundreds",
        "test_early.py": "test_one test_four test_year test_last test_letters",
        "test_table.py": "test_pairs[2-II] test_pairs[9-IX] test_pairs[90-XC] test_pairs[444-CDXLIV] test_more_pairs[58-LVIII]",
        "test_unit.py": "RomanTest::test_hundreds RomanTest::test_letters_grow RomanTest::test_nothing",
    }.items()
    for name in names.split()
)


@pytest.fixture(scope="module")
def forgeries() -> Iterator[ModuleType]:
    """The benchmark; it leaves with its last test."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("forgeries")
    sys.path.remove(str(BENCHMARKS))
    del sys.modules["forgeries"]


@pytest.fixture(scope="module")
def numerals(
    forgeries: ModuleType, make_store: Any, sized_tasks: Any, store: TaskStore, clamp: Task
) -> TaskStore:
    """The benchmark's task, with all its tests shown, as a build would make it; in the environment of another store."""
    files = {path: text.encode() for path, text in forgeries.TABLE["project"].items()}
    hand = replace(
        sized_tasks["t-function-body"], task_id="numerals", path="numerals/writing.py", symbol="to_roman",
        functions=("numerals/writing.py::to_roman",), visible=SHOWN, hidden=(), without_hidden=None,
    )  # fmt: skip
    made: TaskStore = make_store(hand, files=files, name="numerals")
    environment = store.environment(clamp)
    made.environment = lambda _: environment  # type: ignore[method-assign]
    return made


@pytest.fixture(scope="module")
def task(numerals: TaskStore) -> Task:
    return numerals.tasks()[0]


@pytest.fixture(scope="module")
def judge(numerals: TaskStore) -> Iterator[Grader]:
    grader = Grader(numerals, num_jobs=1)
    yield grader
    grader.close()


FORGED = "outcomes were forged"
CHOSEN = {
    # how it is refused: by a sign of forging, or because nothing was won or the run did not come to its end
    "os._exit(0) in the call": "closing record",
    "written to every descriptor": "something else than the test runner",
    "known tests emptied in files that come later, put back afterwards": "",
    "a plugin that passes the known tests alone": FORGED,
    "TestReport says passed for the known tests": FORGED,
    "pytest.raises and pytest.fail let everything through": "",
    "equal to everything": FORGED,
    "read out of the running test": FORGED,
    "tests whose code occurs twice run another function": FORGED,
    "gc finds whatever can write, and writes": "",
    "by a forked process: os.fork": "something else than the test runner",
    "an event without what belongs to it fails in the hook": "",
    "its own memory is opened: below a folder": FORGED,
    "what calls a test is exchanged for a while, and put back for the last one": FORGED,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_forgery_is_not_paid_for(forgeries: ModuleType, judge: Grader, task: Task, name: str) -> None:
    attempt = next(attempt for attempt in forgeries.ATTEMPTS if attempt.name == name)
    succeeded, why = forgeries.try_attempt(judge, task, attempt)
    assert not succeeded
    assert CHOSEN[name] in why


def test_honest_answers_pass_with_sentinels_among_the_tests(
    forgeries: ModuleType, judge: Grader, numerals: TaskStore, task: Task
) -> None:
    answers = [numerals.golden_body(task), *forgeries.TABLE["honest"].values()]
    scores = judge.grade_many([GradeRequest(task, answer) for answer in answers], afresh=True)
    assert [forgeries.refusal(score) for score in scores] == [""] * len(answers)
    assert all(score is not None and set(score.outcomes) == set(task.tests.visible) for score in scores)


def test_what_a_partly_right_answer_passes_still_counts(judge: Grader, task: Task) -> None:
    right_below_ten = (
        "\n    if number < 1 or number > 3999:\n        raise ValueError('no numeral')\n"
        "    return 'I II III IV V VI VII VIII IX'.split()[(number - 1) % 9]\n"
    )
    score = judge.grade(task, right_below_ten)
    assert score is not None
    assert score.error == ""
    assert 0 < score.num_passed < len(score.outcomes)


def test_each_attempt_is_a_program_and_has_a_name_of_its_own(forgeries: ModuleType) -> None:
    attempts = forgeries.ATTEMPTS
    assert len({(attempt.family, attempt.name) for attempt in attempts}) == len(attempts) == 85
    for attempt in attempts:
        compile(f'def f(number):\n    """Doc."""{attempt.answer(["t.py::test_a[1]"])}', attempt.name, "exec")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_forgery_succeeds_and_every_honest_answer_passes(
    forgeries: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    code = forgeries.main(["--honest", "10"])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    assert f"0 of {len(forgeries.ATTEMPTS)} forgeries succeeded; 0 honest gradings failed" in printed.out
    assert "the twin fails" in printed.out


def test_hostile_answers_are_not_run_without_a_jail(
    forgeries: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        forgeries.main(["--backend", "none"])
    assert ended.value.code == 2
    assert "no jail" in capsys.readouterr().err
