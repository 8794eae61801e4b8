"""A suite that a limit ended is no red one: the reason says which limit, and what can be typed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.errors import UsageError
from composer_replication.records import Outcome
from composer_replication.sandbox.supervised_run import Verdict
from composer_replication.tasks.blobs import read_file
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.gate_failed import GateFailed
from composer_replication.tasks.gates import (
    failing_of,
    suite_trial,
)
from composer_replication.tasks.journal import decision_key
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import SUITE_SECONDS, RepositoryRecord
from composer_replication.tasks.stored_subject import bench_of, subject_of
from composer_replication.tasks.suite_limits import cut_off, failed_at_a_limit
from composer_replication.tasks.test_run import TestReport

MakeProject = Callable[[Mapping[str, str]], Path]
ONE = "def one():\n    return 11\n"
SLOW = "import time\n\n\ndef test_slow():\n    time.sleep(1.2)\n"
TEST_ONE = (
    "import planted\n\n\ndef test_one():\n    assert planted.one() == 11\n\n\ndef test_two():\n    pass\n"
)


def report(error: str = "", **why: str) -> TestReport:
    outcomes = dict.fromkeys(why, Outcome.FAILED)
    return TestReport(outcomes, tuple(why), error, 1.0, why=why)


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (
            "the tests ran longer than 180 s (exit code 137)",
            "too-slow",
            "the suite ran longer than 180 s; --suite-seconds 540 gives it more time",
        ),
        ("the tests used more memory than allowed (exit code 137)", "too-large", "more than 2 GiB of memory, and was"),
        (f"the run ended without its closing record ([sandbox] stopped: {Verdict.OVER_DISK.value})", "too-large", "256 MiB of disk"),
        (f"the run ended without its closing record ([sandbox] stopped: {Verdict.OVER_PROCESSES.value})", "too-large", "64 processes"),
        ("the run ended without its closing record (exit code 0)", "red-baseline", "closing record"),
        ("a record is malformed", "red-baseline", "a record is malformed"),
    ],
)  # fmt: skip
def test_a_run_that_was_ended(error: str, reason: str, words: str) -> None:
    refusal = cut_off(report(error), 180.0)
    assert refusal.reason == reason
    assert words in refusal.detail
    assert cut_off(report(error), 180.0, "in another order, ").detail == f"in another order, {refusal.detail}"
    assert ("no flag raises it" in refusal.detail) is (reason == "too-large")


def test_more_time_than_a_day_is_not_told() -> None:
    refusal = cut_off(report("the tests ran longer than 80000 s"), 80_000.0)
    assert "--suite-seconds 86400 gives" in refusal.detail


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("MemoryError", "memory, of which a sandbox has 2 GiB"),
        ("OSError: [Errno 12] Cannot allocate memory", "memory"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 3.00 GiB for an array", "memory"),
        ("OSError: [Errno 28] No space left on device", "disk, of which a sandbox has 256 MiB"),
        ("OSError: [Errno 27] File too large", "disk"),
        ("RuntimeError: can't start new thread", "processes, of which a sandbox has 64"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "processes"),
        ("OSError: [Errno 24] Too many open files: 'x'", "open files, of which a sandbox has 256"),
        ("assert 1 == 2", ""),
        ("ModuleNotFoundError: No module named 'MemoryError'", ""),
        ("AssertionError: MemoryError was not raised", ""),
    ],
)
def test_how_limits_show_in_a_test(text: str, words: str) -> None:
    refusal = failed_at_a_limit(report(test_a=text, test_b="assert 0"), 0, 1.0)
    assert (refusal is not None) is bool(words)
    if refusal is not None:
        assert refusal.reason == "too-large"
        assert refusal.detail.startswith(f"1 tests failed for want of {words}")
        assert f"(the first is test_a: {text})" in refusal.detail


@pytest.mark.parametrize(("num_green", "is_too_large"), [(0, False), (1, False), (2, True), (3, True)])
def test_limits_are_named_where_without_them_enough_were_green(num_green: int, is_too_large: bool) -> None:
    """Of ten tests five are needed; three met a limit."""
    why = {f"test_{i}": "MemoryError" for i in range(3)}
    assert (failed_at_a_limit(report(**why), num_green, 5.0) is not None) is is_too_large


@pytest.mark.long
def test_a_slow_suite_is_too_slow_and_a_flag_changes_that(make_project: MakeProject, tmp_path: Path) -> None:
    source = str(make_project({
        "planted.py": ONE, "test_planted.py": TEST_ONE, "test_slow.py": SLOW,
    }))  # fmt: skip
    summary = build_tasks([source], tmp_path / "out", suite_seconds=1.0)
    assert dict(summary.rejected) == {"too-slow": 1}
    assert summary.unusable[source] == (
        "too-slow: the suite ran longer than 1 s; --suite-seconds 3 gives it more time; "
        "test_slow.py::test_slow was running"
    )
    # The same folder goes on, and says how long a suite may take in it.
    assert build_tasks([source], tmp_path / "out", suite_seconds=300.0).tasks == 1
    store = TaskStore.open(tmp_path / "out")
    (record,) = store.repositories()
    assert record.suite_seconds == 300.0
    # With the default there is no word of it: the bytes are those of a store from before.
    usual = build_tasks([source], tmp_path / "out")
    (kept,) = TaskStore.open(tmp_path / "out").repositories()
    assert kept.suite_seconds == SUITE_SECONDS
    assert b"suite_seconds" not in b"".join(map(read_file, (tmp_path / "out" / "repositories").iterdir()))
    assert build_tasks([source], tmp_path / "fresh").fingerprint == usual.fingerprint
    # A stored task is judged in the time that its build had.
    store = TaskStore.open(tmp_path / "out")
    (task,) = store.tasks()
    subject = subject_of(store, task)

    def failing() -> frozenset[str]:
        bench = bench_of(store, task)
        return failing_of(bench.run_all([suite_trial(subject, bench)])[0], subject, kept)

    assert failing() == {"test_planted.py::test_one"}
    store.put_repository("planted-1.0", with_seconds(kept, 0.25))
    with pytest.raises(
        GateFailed, match=r"broken-run-fails.*longer than 0.25 s"
    ):  # four times as long by the clock
        failing()
    # A decision under another limit is another one.
    keys = {
        decision_key(with_seconds(kept, seconds), "planted.py::one", hidden_share=0.5, seed=0)
        for seconds in (SUITE_SECONDS, 60.0, 61.0)
    }
    assert len(keys) == 3
    assert decision_key(kept, "planted.py::one", hidden_share=0.5, seed=0) in keys


def with_seconds(record: RepositoryRecord, seconds: float) -> RepositoryRecord:
    return RepositoryRecord.from_json({**record.to_json(), "suite_seconds": seconds})


def test_tests_that_want_too_much_memory(make_project: MakeProject, tmp_path: Path) -> None:
    large = "".join(f"def test_large_{i}():\n    bytearray(3 * 1024**3)\n\n\n" for i in range(5))
    root = make_project({"planted.py": ONE, "test_a.py": large, "test_planted.py": TEST_ONE})
    summary = build_tasks([str(root)], tmp_path / "out")
    assert dict(summary.rejected) == {"too-large": 1}
    assert "2 GiB" in summary.unusable[str(root)]
    (root / "test_a.py").write_text(large.replace("bytearray(3 * 1024**3)", "assert bytearray(1) == 2"))
    assert dict(build_tasks([str(root)], tmp_path / "red").rejected) == {"red-baseline": 1}


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 86_401.0])
def test_suite_seconds_that_are_none(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(UsageError, match="suite_seconds") as caught:
        build_tasks(["x"], tmp_path / "out", suite_seconds=seconds)
    assert caught.value.code == "CR0421"


def test_the_flag_and_the_sentence(
    make_project: MakeProject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_project({
        "planted.py": ONE, "test_planted.py": TEST_ONE, "test_slow.py": SLOW,
    })  # fmt: skip
    words = ["tasks", "build", str(root), "--out", str(tmp_path / "out"), "--json", "--quiet"]
    assert main([*words, "--suite-seconds", "1"]) == 4
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "CR0419"
    assert "the suite ran longer than 1 s; --suite-seconds 3 gives it more time" in error["message"]
    assert main([*words, "--suite-seconds", "0"]) == 2
    assert "CR0421" in capsys.readouterr().out
