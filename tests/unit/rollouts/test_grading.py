"""Grading in real sandboxes: golden passes, wrong and hostile answers fail, failure of a sandbox is no grade."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.records import Check, Outcome, SandboxSpec, Task
from composer_replication.rollouts import grading
from composer_replication.rollouts.grading import Grader, GradeRequest
from composer_replication.sandbox import LocalSandbox, choose_backend, selftest
from composer_replication.tasks.running.watched_run import run_watched
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.test_run import TestReport, Trial
from composer_replication.tasks.twin.twin_run import TwinScore


def test_the_golden_body_passes_visible_and_hidden_tests(
    grader: Grader, store: TaskStore, clamp: Task
) -> None:
    golden = store.golden_body(clamp)
    scores = grader.grade_many([GradeRequest(clamp, golden), GradeRequest(clamp, golden, "hidden")])
    assert [score is not None and score.all_passed for score in scores] == [True, True]
    assert scores[0] is not None
    assert set(scores[0].outcomes) == set(clamp.tests.visible)
    assert scores[1] is not None
    assert set(scores[1].outcomes) == set(clamp.tests.hidden)


def test_leaving_the_process_at_import_is_a_failure_of_the_candidate(grader: Grader, clamp: Task) -> None:
    score = grader.grade(clamp, "\n    pass\nimport os\nos._exit(0)\n")
    assert score is not None
    assert "closing record" in score.error
    assert set(score.outcomes.values()) == {Outcome.FAILED}


@pytest.mark.long
def test_an_endless_answer_is_stopped_by_what_golden_code_needs(
    store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = []

    def noted(tree: Path, environment: Any, trial: Trial, **keywords: Any) -> TestReport:
        allowed.append(trial.seconds)
        return run_watched(tree, environment, trial, **keywords)

    monkeypatch.setattr(grading, "run_watched", noted)
    monkeypatch.setattr(Grader, "timeout_seconds", 500.0)
    grader = Grader(store)
    try:
        score = grader.grade(clamp, "\n    while True:\n        pass")
    finally:
        grader.close()
    assert score is not None
    *golden, answer = allowed
    assert golden == [500.0] * 2
    assert 2.0 <= answer < 100.0
    assert "longer than" in score.error
    assert set(score.outcomes.values()) == {Outcome.FAILED}


def test_an_answer_cannot_change_the_next_grading(grader: Grader, store: TaskStore, clamp: Task) -> None:
    vandal = (
        "\n    import pathlib\n    for file in pathlib.Path('tests').glob('*.py'):\n"
        "        file.write_text('def test_nothing():\\n    pass\\n')\n    return 0"
    )
    first = grader.grade(clamp, vandal)
    assert first is not None
    assert not first.all_passed
    second = grader.grade(clamp, store.golden_body(clamp) + "\n    # again")
    assert second is not None
    assert second.all_passed


def counted_runs(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> list[GradeRequest]:
    """What the grader runs from now on, each try."""
    runs: list[GradeRequest] = []
    once = grader.grade_once
    monkeypatch.setattr(grader, "grade_once", lambda request: runs.append(request) or once(request))
    return runs


def test_a_sandbox_that_fails_is_tried_again_and_gives_no_grade(
    store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader = Grader(store)
    runs = counted_runs(grader, monkeypatch)
    monkeypatch.setattr(grader, "backend", "fake_sandbox:BrokenBackend")
    try:
        assert grader.grade(clamp, "\n    return 1") is None
    finally:
        grader.close()
    assert len(runs) == 2


class Elsewhere:
    """A jail of another machine, on which the original code of one task does not do what it did."""

    name = "elsewhere"
    is_bad = True

    def is_available(self) -> Check:
        return choose_backend().is_available()

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        path = spec.tree / "tinymath" / "numbers.py"
        if self.is_bad and path.is_file():
            path.write_text(f"{path.read_text()}\n\ndef clamp(*_):\n    raise OSError('no network here')\n")
        return choose_backend().open(spec)


def test_original_code_that_does_not_pass_here_is_a_failure_of_the_sandbox_and_never_a_zero(
    store: TaskStore, clamp: Task, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and tried again."""
    monkeypatch.setattr(grading, "require_selftest", lambda *_, **__: ())  # this jail is bubblewrap's
    grader = Grader(store, backend=f"{__name__}:Elsewhere")
    runs = counted_runs(grader, monkeypatch)
    golden = store.golden_body(clamp)
    try:
        assert grader.grade(clamp, golden) is None
        assert (len(runs), grader.num_infrastructure_failures) == (2, 1)
        (record,) = caplog.records
        assert record.getMessage().startswith(
            f"CR0494: the original code of {clamp.task_id} does not pass here, in "
        )
        assert "Elsewhere" in record.getMessage()
        assert f"it was proven in {store.proved_by[0]}" in record.getMessage()
        monkeypatch.setattr(Elsewhere, "is_bad", False)
        score = grader.grade(clamp, golden)
        assert score is not None and score.all_passed
    finally:
        grader.close()


def test_a_twin_that_the_original_code_does_not_pass_here_says_nothing(
    grader: Grader, clamp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[bool] = []
    monkeypatch.setattr(grading, "judge_twin", lambda *_, **__: TwinScore(int(passes.pop(0)), 1, 0, 0))
    monkeypatch.setattr(grader.store, "twins", lambda _: {"elsewhere.py::clamp": None})
    passes[:] = [False] * 4  # the answer, and the original code; each twice
    assert grader.grade(clamp, "\n    return 1  # judged elsewhere", "hidden") is None
    passes[:] = [False, True]
    score = grader.grade(clamp, "\n    return min(max(value, low), high)  # judged here", "hidden")
    assert score is not None
    assert score.outcomes["twin::elsewhere.py::clamp"] is Outcome.FAILED


def test_no_reward_is_given_while_the_self_test_fails(store: TaskStore) -> None:
    with pytest.raises(SandboxFailure):
        Grader(store, backend="fake_sandbox:BrokenBackend")


@pytest.mark.long
def test_weakened_tests_pay_for_a_wrong_answer_that_does_not_raise(
    grader: Grader, store: TaskStore, clamp: Task
) -> None:
    wrong, raising = "\n    return 'wrong'", "\n    return 1 / 0"
    scores = grader.grade_many(
        [GradeRequest(clamp, a, kind) for a in (wrong, raising) for kind in ("visible", "weakened", "hidden")]
    )
    assert [score is not None and score.all_passed for score in scores] == [
        False, True, False,
        False, False, False,
    ]  # fmt: skip


class ShowsTheStore:
    """A jail that holds, but for the folder with the hidden tests."""

    name = "shows-the-store"
    store = Path()

    def is_available(self) -> Check:
        return choose_backend().is_available()

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        return choose_backend().open(replace(spec, read_only=(*spec.read_only, self.store)))


def test_no_reward_is_given_where_the_sandbox_shows_the_hidden_tests(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShowsTheStore, "store", store.root)
    # the others take long
    monkeypatch.setattr(selftest, "GUARDS", {"host_files": selftest.GUARDS["host_files"]})
    for path in (store.root, *store.root.rglob("*")):  # the jail of root is another user
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    with pytest.raises(SandboxFailure, match=r"CR0306.*host_files .*/secrets/"):
        Grader(store, backend=f"{__name__}:ShowsTheStore")


def test_an_interrupted_grading_gives_no_score_and_the_grader_goes_on(grader: Grader, clamp: Task) -> None:
    answers = [f"\n    import time; time.sleep({seconds})" for seconds in (0, 15, 16)]

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grader.grade_many([GradeRequest(clamp, answer) for answer in answers], on_done=interrupt)
    score = grader.grade(clamp, "\n    return low")
    assert score is not None
    assert not score.all_passed
