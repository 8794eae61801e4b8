"""Tests that the reward counts and no rollout shows: drawn fairly, out of the tree, kept in the record."""

from __future__ import annotations

import ast
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.records import Completion, Edit, Outcome, Score, StopReason, TestSplit
from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.episode import Episode, EpisodeTurn
from composer_replication.rollouts.hints.hinted_turns import ObservedRollout, find_faults
from composer_replication.rollouts.hints.task_observer import known_tasks
from composer_replication.rollouts.monitor import public_task
from composer_replication.tasks import gates
from composer_replication.tasks.gates import GateFailed, Parting, Subject
from composer_replication.tasks.planning.edits import Changes
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import TaskRecord
from composer_replication.tasks.swebench import rows_of
from composer_replication.tasks.test_functions import function_texts
from composer_replication.tasks.test_run import TestReport, Trial

SOURCE = "def area(x):\n    if x < 0:\n        raise ValueError('no area is negative')\n    return x * x\n"
NAMES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TESTS = "import m\n" + "".join(
    f"\n\ndef test_{name}():\n    assert m.area({number}) == {number * number}\n"
    for number, name in enumerate(NAMES, start=1)
)
TEST_FILE = "tests/test_m.py"
GIVEN = frozenset({"area"})


def prepared(tests: str, source: str = SOURCE) -> tuple[dict[str, bytes], Any, Subject]:
    """Files, a repository, and the deletion of the body of ``area``."""
    places = {
        f"{TEST_FILE}::{node.name}": (TEST_FILE, node.lineno, node.name)
        for node in ast.parse(tests).body
        if isinstance(node, ast.FunctionDef)
    }
    head = source.index("\n") + 1
    edit = Edit("m.py", head, len(source), "    raise NotImplementedError\n")
    files = {"m.py": source.encode(), TEST_FILE: tests.encode()}
    repository = SimpleNamespace(places=places, green=frozenset(places))
    return files, repository, Subject(Changes((edit,)), (edit,), is_whole=False)


def drawn(tests: str = TESTS, *, hidden_share: float = 0.34, seed: int = 0, salt: str = "s") -> Subject:
    files, repository, unsplit = prepared(tests)
    parting = Parting(unsplit, repository, files, seed=seed, given=GIVEN)
    return parting.pay(parting.hide(repository.green, share=hidden_share, salt=salt), salt=salt)


def functions_in(subject: Subject, view: str, tests: str = TESTS) -> set[str]:
    files, _, _ = prepared(tests)
    text = subject.broken(files, view)[TEST_FILE].decode()
    return {f"{TEST_FILE}::{name}" for _, name in function_texts(text)}


def test_a_third_of_the_visible_tests_is_paid_and_in_no_tree_of_a_rollout() -> None:
    subject = drawn()
    assert (len(subject.tests.shown), len(subject.tests.paid), len(subject.tests.hidden)) == (4, 2, 3)
    assert set(subject.tests.paid) < set(subject.tests.visible) and subject.tests.visible == tuple(
        sorted(subject.tests.visible)
    )
    assert functions_in(subject, "rollout") == set(subject.tests.shown)
    assert functions_in(subject, "visible") == set(subject.tests.visible)
    assert functions_in(subject, "hidden") == {*subject.tests.visible, *subject.tests.hidden}


def test_the_draw_is_the_same_again_and_another_one_by_seed_and_salt() -> None:
    assert drawn() == drawn()
    assert len({drawn(seed=seed, salt=salt).tests.paid for seed in range(4) for salt in "ab"}) > 2


@pytest.mark.parametrize(
    ("num_tests", "share", "num_hidden"), [(1, 0.9, 0), (2, 0.01, 1), (2, 0.5, 1), (3, 0.99, 2), (3, 0.0, 0)]
)
def test_never_all_are_hidden(num_tests: int, share: float, num_hidden: int) -> None:
    files, repository, unsplit = prepared("\n\n\n".join(TESTS.split("\n\n\n")[: num_tests + 1]))
    parting = Parting(unsplit, repository, files, seed=0, given=GIVEN)
    subject = parting.hide(repository.green, share=share, salt="s")
    assert (len(subject.tests.visible), len(subject.tests.hidden)) == (num_tests - num_hidden, num_hidden)


def test_hidden_tests_are_those_that_were_hidden_before_there_were_paid_ones() -> None:
    files, repository, unsplit = prepared(TESTS)
    parting = Parting(unsplit, repository, files, seed=0, given=GIVEN)
    before = parting.hide(repository.green, share=0.34, salt="s")
    assert not before.tests.paid and before.tests.shown == before.tests.visible
    assert (before.tests.visible, before.tests.hidden) == (drawn().tests.visible, drawn().tests.hidden)


@pytest.mark.parametrize(("num_functions", "num_paid"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (9, 3)])
def test_with_fewer_than_three_visible_functions_all_are_shown(num_functions: int, num_paid: int) -> None:
    tests = "".join(TESTS.partition("\n\n\ndef ")[1:]).split("\n\n\n")[1 : num_functions + 1]
    subject = drawn("import m\n\n\n" + "\n\n\n".join(tests), hidden_share=0.0)
    assert (len(subject.tests.visible), len(subject.tests.paid)) == (num_functions, num_paid)


def test_a_test_that_asks_for_what_only_it_tells_is_shown() -> None:
    message = '\n\ndef test_words():\n    with pytest.raises(ValueError, match="no area is negative"):\n        m.area(-1)\n'
    for seed in range(8):
        subject = drawn(TESTS + message, hidden_share=0.0, seed=seed)
        assert subject.tests.paid and f"{TEST_FILE}::test_words" in subject.tests.shown


def test_a_copy_of_a_test_that_is_shown_is_not_paid() -> None:
    copies = "".join(f"\n\ndef test_same_{n}():\n    assert m.area(7) == 49\n" for n in range(6))
    subject = drawn("import m\n" + copies, hidden_share=0.0)
    assert len(subject.tests.visible) == 6 and not subject.tests.paid


def test_what_stays_in_the_tree_is_refused() -> None:
    files, repository, _ = prepared(TESTS)
    subject = drawn()
    gates.check_fair(subject, repository, files, (), GIVEN)
    shown = replace(subject, changes=replace(subject.changes, shown_edits=None))
    with pytest.raises(GateFailed, match="hidden-shown"):
        gates.check_fair(shown, repository, files, (), GIVEN)
    paid = subject.tests.paid[0].rpartition("::")[2]
    copied = {**files, "tests/test_more.py": TESTS.replace(paid, "test_other").encode()}
    with pytest.raises(GateFailed, match=r"hidden-shown: .* or a copy"):
        gates.check_fair(subject, repository, copied, (), GIVEN)


@pytest.mark.parametrize("side", ["visible", "paid", "hidden"])
def test_no_constant_passes_all_tests_of_a_side(side: str) -> None:
    subject = drawn()
    assert gates.passing_stub(subject, {"None": frozenset(subject.tests.shown)}) is None
    refused = gates.passing_stub(subject, {"None": frozenset(subject.sides[side])})
    assert str(refused).startswith(f"stub-passes: the {side} tests")


def test_a_draw_that_a_constant_passes_is_drawn_again_and_at_last_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, repository, unsplit = prepared(TESTS)
    parting = Parting(unsplit, repository, files, seed=0, given=GIVEN)
    whole = parting.hide(repository.green, share=0.0, salt="p")
    first, second = (parting.pay(whole, salt=f"p/paid/{number}") for number in range(2))

    def drawn_with(*passed: str) -> list[Subject]:
        stubs = {"None": frozenset(passed)}
        return list(gates.draws(parting, repository.green, stubs, hidden_share=0.0, pin="p"))

    found, without = drawn_with(*first.tests.paid)
    assert found.tests.paid and found.tests.paid != first.tests.paid
    assert without == whole
    monkeypatch.setattr(gates, "NUM_PAID_DRAWS", 2)
    assert drawn_with(*first.tests.paid, *second.tests.paid) == [whole]
    with pytest.raises(GateFailed, match="stub-passes: the visible tests"):
        drawn_with(*whole.tests.visible)


def test_a_paid_test_that_fails_with_the_code_is_refused_without_its_name() -> None:
    subject = drawn(hidden_share=0.0)

    def report(tests: tuple[str, ...], failing: str = "") -> TestReport:
        outcomes = {test: Outcome.FAILED if test == failing else Outcome.PASSED for test in tests}
        return TestReport(outcomes, tests, "", 0.1, cpu_seconds=0.1)

    shown, visible, paid = subject.tests.shown, subject.tests.visible, subject.tests.paid
    trials = {"visible": Trial({}, shown), "paid": Trial({}, visible)}
    gates.check_golden(trials, {"visible": report(shown), "paid": report(visible)}, 20.0)
    with pytest.raises(GateFailed, match="golden-fails") as caught:
        gates.check_golden(trials, {"visible": report(shown), "paid": report(visible, paid[0])}, 20.0)
    assert subject.tests.paid[0] not in str(caught.value)


def test_a_record_keeps_them_and_one_of_an_earlier_version_shows_all(
    make_store: Any, sized_tasks: Any
) -> None:
    store: TaskStore = make_store(sized_tasks["t-feature-body"])
    (task,) = store.tasks()
    record = store.record(task.task_id)
    assert not record.paid_tests and task.tests.shown == task.tests.visible
    assert not {"paid_tests", "shown_edits"} & set(record.to_json())
    narrowed = with_clamp_above_paid(store)
    assert TaskRecord.from_json(narrowed.to_json()) == narrowed
    with pytest.raises(ValueError, match="not among the visible"):
        TaskRecord.from_json({**narrowed.to_json(), "paid_tests": ["tests/test_m.py::test_x"]})


def with_clamp_above_paid(store: TaskStore) -> TaskRecord:
    """The record of the only task with one of its three tests paid, put into the store."""
    (task,) = store.tasks()
    record = store.record(task.task_id)
    text = store.files(task, "visible")["tests/test_numbers.py"].decode()
    start = text.index("def test_clamp_above")
    cut = Edit("tests/test_numbers.py", start, text.index("def test_mean()"), "")
    narrowed = replace(record, paid_tests=("tests/test_numbers.py::test_clamp_above",), shown_edits=(cut,))
    store.put_task(narrowed, store.secret(task.task_id))
    return narrowed


def test_nothing_that_a_policy_is_told_names_a_paid_test(make_store: Any, sized_tasks: Any) -> None:
    store: TaskStore = make_store(sized_tasks["t-feature-body"])
    with_clamp_above_paid(store)
    (task,) = store.tasks()
    assert len(task.tests.shown) == 2 and len(task.tests.visible) == 3
    message = first_message(store, task)
    assert "test_clamp_below" in message and "test_clamp_above" not in message and "50" not in message
    public, _ = rows_of(store, task)
    assert "test_clamp_above" not in str(public) and "test_clamp_below" in str(public)
    assert "test_clamp_above" not in str(public_task(task))
    known = known_tasks(store, lambda task: first_message(store, task))(task.task_id)
    assert known.is_leak("look at test_clamp_above") and not known.is_leak("look at test_clamp_below")
    failing = Score(dict.fromkeys(task.tests.visible, Outcome.FAILED), paid=task.tests.paid)
    assert set(known.failed_tests(failing)) == set(task.tests.shown)


def test_an_attempt_that_fails_paid_tests_alone_has_no_fault_that_names_them() -> None:
    score = Score({"t.py::test_a": Outcome.PASSED, "t.py::test_b": Outcome.FAILED}, paid=("t.py::test_b",))
    turn = EpisodeTurn((1,), Completion((2,), "    return x\n", StopReason.FINISHED))
    episode = Episode("t", 0, 1, 0, (turn,), stop_reason=StopReason.FINISHED, score=score, reward=0.0)
    assert not find_faults(ObservedRollout(episode))
    [unpaid] = find_faults(ObservedRollout(replace(episode, score=replace(score, paid=()))))
    assert unpaid.texts == ("test_b fails.",)


def test_a_score_knows_shown_and_paid_apart() -> None:
    outcomes = {"a": Outcome.PASSED, "b": Outcome.FAILED}
    score = Score(outcomes, paid=("b",))
    assert (score.passed_all(paid=False), score.passed_all(paid=True), score.all_passed) == (
        True,
        False,
        False,
    )
    assert not Score(outcomes).passed_all(paid=True)
    assert not replace(score, error="broke off").passed_all(paid=False)
    task_tests = TestSplit(("a", "b"), ("c",), (), ("b",))
    assert (task_tests.shown, task_tests.unseen) == (("a",), ("c", "b"))


# --- a fair draw is looked for before none is hidden ---


UNFAIR_SOURCE = "def append(x): return 1\ndef yy(): return 1\ndef xx(): return 1\n"
# Two copies, of which none can be hidden alone, and two that ask for names that only the other says.
UNFAIR_TESTS = """import m


def test_a():
    assert m.append(1) == 1


def test_a_again():
    assert m.append(1) == 1


def test_b():
    assert m.yy() == 1


def test_c():
    assert m.xx() == 1
"""
UNFAIR_FILES = {"m.py": UNFAIR_SOURCE.encode(), "tests/test_m.py": UNFAIR_TESTS.encode()}
PLACES = {
    f"tests/test_m.py::{node.name}": ("tests/test_m.py", node.lineno, node.name)
    for node in ast.parse(UNFAIR_TESTS).body
    if isinstance(node, ast.FunctionDef)
}
UNSPLIT = Subject(Changes((Edit("m.py", 0, len(UNFAIR_SOURCE), ""),), (), (), ()), (), True)


def test_a_draw_that_can_hide_nothing_is_not_the_last() -> None:
    repository: Any = SimpleNamespace(places=PLACES, green=frozenset(PLACES))
    parting = Parting(UNSPLIT, repository, UNFAIR_FILES, seed=0, given=frozenset())
    with_an_empty_first_draw = 0
    for pin in map(str, range(8)):
        first = parting.hide(frozenset(PLACES), share=0.5, salt=f"{pin}/0")
        with_an_empty_first_draw += not first.tests.hidden
        found = next(gates.draws(parting, frozenset(PLACES), {}, hidden_share=0.5, pin=pin))
        assert found.tests.hidden, pin
    assert 0 < with_an_empty_first_draw < 8
