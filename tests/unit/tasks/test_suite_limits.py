"""A suite that a limit ended is no red one: the reason says which limit, and what can be typed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.errors import UsageError
from composer_replication.records import Outcome
from composer_replication.tasks import repository
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.candidate import Candidate, Settings
from composer_replication.tasks.gates import GateFailed, bench_of, failing_of, subject_of, suite_trial
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.planning.body_cuts import Deletion
from composer_replication.tasks.repository import PreparedRepository, cut_off, run_suite
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import read_content
from composer_replication.tasks.store_records import SUITE_SECONDS, RepositoryRecord
from composer_replication.tasks.test_run import Ended, TestReport, Trial

MakeProject = Callable[[Mapping[str, str]], Path]
ONE = "def one():\n    return 11\n"
TEST_ONE = (
    "import planted\n\n\ndef test_one():\n    assert planted.one() == 11\n\n\ndef test_two():\n    pass\n"
)


def report(error: str = "", ended: Ended = Ended.BY_ITSELF, **why: str) -> TestReport:
    outcomes = dict.fromkeys(why, Outcome.FAILED)
    return TestReport(outcomes, tuple(why), error, 1.0, why=why, ended=ended)


@pytest.mark.parametrize(
    ("ended", "reason", "words"),
    [
        (Ended.TIME, "too-slow", "the suite ran longer than 180 s; --suite-seconds 540 gives it more time"),
        (Ended.LIMIT, "too-large", "what it says"),
        (Ended.EMPTY, "red-baseline", "what it says"),
        (Ended.BY_ITSELF, "red-baseline", "what it says"),
    ],
)
def test_a_run_that_was_ended(ended: Ended, reason: str, words: str) -> None:
    refusal = cut_off(report("what it says", ended), 180.0)
    assert refusal.reason == reason
    assert words in refusal.detail


def test_a_suite_that_waits_is_not_told_to_take_more_time() -> None:
    waits = replace(report("x", Ended.TIME), broke="it waited 10 s for something that did not come")
    assert cut_off(waits, 30.0).detail == waits.broke


def broken(where: str, how: str) -> TestReport:
    return replace(report("the run ended"), running=where, broke=how)


def test_what_ended_a_suite_is_said_first_and_met_twice_at_most(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies, no_file = broken("t.py::a", "it ends the process"), broken("u.py", "importing it ends the run")
    runs = iter([dies, no_file, report(**{"t.py::b": "assert 1 == 2"}), dies, dies])
    monkeypatch.setattr(repository, "run_alone", lambda *_, **__: next(runs))
    bench = Bench({}, environment, None, 60.0, 20.0)
    whole, left_out = run_suite(bench)
    assert left_out == {"t.py::a": "it ends the process", "u.py": "importing it ends the run"}
    assert list(whole.why) == ["t.py::a", "t.py::b"]
    assert whole.outcomes == {"t.py::a": Outcome.ERROR, "t.py::b": Outcome.FAILED}
    assert whole.collected == ("t.py::b", "t.py::a")
    assert dict(whole.collect_errors) == {"u.py": "left out: importing it ends the run"}
    # One that ends the suite though it was left out, as its name is longer than what is kept of it.
    with pytest.raises(repository.UnusableRepository, match=r"the run ended; t\.py::a was running"):
        run_suite(bench)


@pytest.mark.long  # one of them is given up after ten seconds
def test_what_ends_a_suite_or_is_not_reached_is_left_out_by_name(environment: Environment) -> None:
    files = {
        "test_a.py": "import os\n\n\ndef test_one():\n    pass\n\n\ndef test_dies():\n    os._exit(3)\n",
        "test_b.py": "import os\n\nos._exit(4)\n",
        "test_c.py": "import pytest\n\n\ndef test_leaves():\n    pytest.exit('no server')\n\n\ndef test_two():\n    pass\n",
        "test_d.py": "import time\n\n\ndef test_slow():\n    time.sleep(60)\n\n\ndef test_late():\n    pass\n",
    }
    bench = Bench({path: text.encode() for path, text in files.items()}, environment, None, 60.0, 20.0)
    found, left_out = run_suite(bench)
    assert (found.error, set(found.passed)) == (
        "",
        {"test_a.py::test_one", "test_c.py::test_two", "test_d.py::test_late"},
    )
    assert {name: reason.partition(" (")[0] for name, reason in left_out.items()} == {
        "test_b.py": "importing it ends the run",
        "test_a.py::test_dies": "it ends the process",
        "test_c.py::test_leaves": "it ends the whole run: Exit: no server",
        "test_d.py::test_slow": "it waited 10 s for something that did not come",
    }
    assert found.why["test_a.py::test_dies"] == "left out: it ends the process (exit code 3)"
    # Later runs of the whole suite go without them.
    quiet = replace(bench, left_out=tuple(left_out))
    (again,) = quiet.run_all([Trial(bench.original, None)])
    assert (again.error, again.passed) == ("", found.passed)


@pytest.mark.long
def test_a_task_is_judged_in_the_time_that_its_build_had(make_project: MakeProject, tmp_path: Path) -> None:
    odd = "import os\n\n\ndef test_dies():\n    os._exit(3)\n"
    source = str(make_project({"planted.py": ONE, "test_odd.py": odd, "test_planted.py": TEST_ONE}))
    summary = build_tasks([source], tmp_path / "out", suite_seconds=300.0)
    assert summary.tasks == 1
    assert summary.unused_tests["planted==1.0"]["first_reason"].startswith(
        "test_odd.py::test_dies: left out: it ends"
    )
    store = TaskStore.open(tmp_path / "out")
    (record,) = store.repositories()
    assert (record.suite_seconds, record.left_out) == (300.0, ("test_odd.py::test_dies",))
    (task,) = store.tasks()
    assert bench_of(store, task).left_out == record.left_out
    assert record.called
    # With the default there is no word of it: the bytes are those of a store from before.
    usual = build_tasks([source], tmp_path / "out")
    (kept,) = TaskStore.open(tmp_path / "out").repositories()
    assert kept.suite_seconds == SUITE_SECONDS
    assert b"suite_seconds" not in b"".join(map(read_content, (tmp_path / "out" / "repositories").iterdir()))
    assert build_tasks([source], tmp_path / "fresh").fingerprint == usual.fingerprint
    # A stored task is judged in the time that its build had.
    store = TaskStore.open(tmp_path / "out")
    (task,) = store.tasks()
    subject = subject_of(store, task)

    def failing() -> frozenset[str]:
        bench = bench_of(store, task)
        return failing_of(bench.run_all([suite_trial(subject, bench)])[0], subject, kept)

    assert failing() == {"test_planted.py::test_one"}
    store.put_repository("planted-1.0", with_seconds(kept, 0.001))
    with pytest.raises(GateFailed, match=r"broken-run-fails.*longer than 0.006 s"):
        failing()
    # A decision under another limit is another one.
    deletion = Deletion("planted.py", "one", "function", "body", (), ())
    repositories = [
        PreparedRepository("planted-1.0", with_seconds(kept, seconds), bench_of(store, task), ())
        for seconds in (SUITE_SECONDS, 60.0, 61.0)
    ]
    keys = [Candidate(one, deletion, Settings(), False).key for one in repositories]
    assert len(set(keys)) == 3


def with_seconds(record: RepositoryRecord, seconds: float) -> RepositoryRecord:
    return RepositoryRecord.from_json({**record.to_json(), "suite_seconds": seconds})


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 86_401.0])
def test_suite_seconds_that_are_none(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(UsageError, match=r"CR0206.*suite_seconds"):
        build_tasks(["x"], tmp_path / "out", suite_seconds=seconds)


def test_the_flag_and_the_sentence(
    make_project: MakeProject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "import time\n\ntime.sleep(60)\n"
    root = make_project({"planted.py": ONE, "test_planted.py": TEST_ONE, "conftest.py": slow})
    words = ["tasks", "build", str(root), "--out", str(tmp_path / "out"), "--json", "--quiet"]
    assert main([*words, "--suite-seconds", "1"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "CR0419"
    assert "the suite ran longer than 1 s; --suite-seconds 3 gives it more time" in error["message"]
    assert main([*words, "--suite-seconds", "0"]) == 2
    assert "CR0206" in capsys.readouterr().out
