"""Whole trees graded in real sandboxes: every size of task, tests that the policy changed, what else it broke."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from composer_replication.records import Outcome, Task
from composer_replication.rollouts import grading
from composer_replication.rollouts.grading import Grader, GradeRequest, Regressions, find_regressions
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_run import TestReport
from composer_replication.tasks.twin.twin_run import TwinScore


@pytest.fixture
def golden(store: TaskStore, clamp: Task) -> dict[str, bytes]:
    """The tree of a policy that wrote the very code."""
    return store.files(clamp, "golden")


@pytest.mark.parametrize("task_id", ["t-module-whole", "t-feature-whole"])
def test_every_size_of_task_is_graded(
    sized_store: TaskStore, store: TaskStore, clamp: Task, task_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = store.environment(clamp)
    monkeypatch.setattr(sized_store, "environment", lambda task: environment)
    task = sized_store.get(task_id)
    grader = Grader(sized_store)
    golden, broken = (sized_store.files(task, view) for view in ("golden", "rollout"))
    tests = "hidden" if task.tests.hidden else "visible"
    try:
        scores = grader.grade_many([GradeRequest(task, "", tests, tree=tree) for tree in (golden, broken)])
    finally:
        grader.close()
    assert [score is not None and score.all_passed for score in scores] == [True, False]
    wanted = task.tests.hidden if tests == "hidden" else task.tests.visible
    assert all(score is not None and set(score.outcomes) == set(wanted) for score in scores)


def test_a_tree_with_the_code_in_a_new_module_passes(
    grader: Grader, clamp: Task, golden: dict[str, bytes]
) -> None:
    text = golden["tinymath/numbers.py"].decode()
    start, end = text.index("def clamp"), text.index("def mean")
    moved = text[:start] + "from tinymath.limits import clamp\n\n\n" + text[end:]
    tree = {**golden, "tinymath/numbers.py": moved.encode(), "tinymath/limits.py": text[start:end].encode()}
    score = grader.grade_tree(clamp, tree)
    assert score is not None and score.all_passed
    del tree["tinymath/limits.py"]
    score = grader.grade_tree(clamp, tree)
    assert score is not None and not score.all_passed


def test_a_forgery_in_a_tree_is_seen(grader: Grader, clamp: Task, golden: dict[str, bytes]) -> None:
    text = golden["tinymath/numbers.py"].decode()
    start, end = text.index("def clamp"), text.index("def mean")
    equal = "class _All:\n    def __eq__(self, other):\n        return True\n\n\ndef clamp(x, low, high):\n    return _All()\n\n\n"
    tree = {**golden, "tinymath/numbers.py": (text[:start] + equal + text[end:]).encode()}
    score = grader.grade_tree(clamp, tree)
    assert score is not None and score.is_forged and score.num_passed == 0


def test_the_same_tree_is_run_once_and_another_is_not_taken_for_it(
    grader: Grader, clamp: Task, golden: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = grader.grade_tree(clamp, golden)
    monkeypatch.setattr(grader, "watched", None)  # a run would end in a TypeError
    assert grader.grade_tree(clamp, dict(reversed(golden.items()))) is first
    for other in ({**golden, "a.txt": b""}, {**golden, "tinymath/numbers.py": b""}):
        with pytest.raises(TypeError):
            grader.grade_tree(clamp, other)
    with pytest.raises(TypeError):
        grader.grade_tree(clamp, golden, "hidden")


def test_broken_neighbours_are_found(grader: Grader, clamp: Task, golden: dict[str, bytes]) -> None:
    assert find_regressions(grader, clamp, golden) == Regressions((), len(clamp.tests.pass_to_pass))
    text = golden["tinymath/numbers.py"].decode()
    wrong = {**golden, "tinymath/numbers.py": text.replace("-x if x < 0 else x", "x").encode()}
    found = find_regressions(grader, clamp, wrong)
    assert found is not None
    assert found.broken == ("tests/test_numbers.py::test_absolute_of_negative",)
    assert found.share == 1 / len(clamp.tests.pass_to_pass)
    sampled = find_regressions(grader, clamp, golden, sample=2)
    assert sampled == Regressions((), 2)


def test_the_tests_that_are_drawn_depend_on_seed_task_and_tree_alone(
    grader: Grader, clamp: Task, golden: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is left out: what is asked for is looked at."""
    asked: list[tuple[str, ...]] = []

    def watched(task: Task, files: object, node_ids: tuple[str, ...], **_: object) -> TestReport:
        asked.append(tuple(node_ids))
        outcomes = dict.fromkeys(node_ids, Outcome.PASSED)
        return TestReport(outcomes, (), error="", seconds=0.0)

    monkeypatch.setattr(grader, "watched", watched)
    trees = [{**golden, "notes.txt": b"%d" % number} for number in range(12)]

    def drawn(seed: int) -> list[tuple[str, ...]]:
        find_regressions(
            grader, clamp, golden
        )  # the tests of the original code are run once, before the first draw
        asked.clear()
        for tree in trees:
            find_regressions(grader, clamp, tree, sample=1, seed=seed)
        return list(asked)

    assert drawn(7) == drawn(7)
    assert len(set(drawn(7))) > 1
    assert drawn(7) != drawn(8)


def test_no_more_tests_run_at_a_time_than_the_grader_has_places(
    store: TaskStore, clamp: Task, golden: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    grader, lock, num_running, most = Grader(store, num_jobs=1), threading.Lock(), 0, 0

    def watched(task: Task, files: object, node_ids: tuple[str, ...], **_: object) -> TestReport:
        nonlocal num_running, most
        with lock:
            num_running += 1
            most = max(most, num_running)
        threading.Event().wait(0.05)
        with lock:
            num_running -= 1
        outcomes = dict.fromkeys(node_ids, Outcome.PASSED)
        return TestReport(outcomes, (), error="", seconds=0.0)

    monkeypatch.setattr(grader, "watched", watched)
    try:
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(lambda _: find_regressions(grader, clamp, golden), range(6)))
    finally:
        grader.close()
    assert found == [Regressions((), len(clamp.tests.pass_to_pass))] * 6
    assert most == 1


def test_a_tree_that_cannot_be_imported_breaks_everything(
    grader: Grader, clamp: Task, golden: dict[str, bytes]
) -> None:
    found = find_regressions(grader, clamp, {**golden, "tinymath/__init__.py": b"raise ImportError\n"})
    assert found is not None
    assert found.share == 1.0
    assert found.broken == tuple(sorted(clamp.tests.pass_to_pass))


def test_a_sandbox_that_fails_says_nothing_of_a_tree(
    store: TaskStore, clamp: Task, golden: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    grader, runs = Grader(store), []
    watched = grader.watched
    monkeypatch.setattr(grader, "watched", lambda *asked, **named: runs.append(1) or watched(*asked, **named))
    monkeypatch.setattr(grader, "backend", "fake_sandbox:BrokenBackend")
    try:
        assert grader.grade_tree(clamp, golden) is None
        assert find_regressions(grader, clamp, golden) is None
    finally:
        grader.close()
    assert len(runs) == 4


def test_tests_that_do_not_pass_with_the_original_code_cannot_be_broken(
    store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader = Grader(store)
    test = clamp.tests.pass_to_pass[0]

    outcomes = dict.fromkeys(clamp.tests.pass_to_pass, Outcome.PASSED) | {test: Outcome.FAILED}
    report = TestReport(outcomes, (), error="", seconds=0.0)
    monkeypatch.setattr(grader, "watched", lambda *_, **__: report)
    found = find_regressions(grader, clamp, {})
    assert found == Regressions((), len(clamp.tests.pass_to_pass) - 1)
    grader.close()


def test_a_run_of_the_original_code_with_an_error_is_tried_again(
    store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader, tests = Grader(store), clamp.tests.pass_to_pass
    outcomes = dict.fromkeys(tests, Outcome.PASSED)
    good = TestReport(outcomes, (), error="", seconds=0.0)
    reports = [replace(good, error="too slow today")] * 2 + [good] * 3
    monkeypatch.setattr(grader, "watched", lambda *_, **__: reports.pop(0))
    assert find_regressions(grader, clamp, {}) is None
    assert len(reports) == 3
    assert (
        find_regressions(grader, clamp, {})
        == find_regressions(grader, clamp, {})
        == Regressions((), len(tests))
    )
    assert not reports
    grader.close()


def test_recorded_behaviour_is_judged_over_the_same_tree(
    grader: Grader, clamp: Task, golden: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[dict[str, bytes]] = []

    def judge(files: dict[str, bytes], *_: object, **__: object) -> TwinScore:
        judged.append(files)
        return TwinScore(1, 1, 0, 0, "")

    monkeypatch.setattr(grading, "judge_twin", judge)
    monkeypatch.setattr(grader.store, "twins", lambda task: {"tinymath/numbers.py::clamp": None})
    tree = {**golden, "conftest.py": b"", "mine.txt": b"x", "tests/test_text.py": b""}
    score = grader.grade_tree(clamp, tree, "hidden")
    assert score is not None and score.all_passed
    assert set(score.outcomes) == {*clamp.tests.hidden, "twin::tinymath/numbers.py::clamp"}
    assert judged == [
        {
            **grader.store.files(clamp, "hidden"),
            "tinymath/numbers.py": golden["tinymath/numbers.py"],
            "mine.txt": b"x",
        }
    ]
