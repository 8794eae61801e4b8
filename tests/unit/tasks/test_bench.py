"""Runs are limited by processor time; a golden one that took too long gets a second, longer one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.running import bench as bench_module
from composer_replication.tasks.running.bench import Bench, Trial

if TYPE_CHECKING:
    import pytest

FILES = {"test_slow.py": b"import time\n\n\ndef test_slow():\n    time.sleep(1.5)\n"}


def test_only_a_golden_run_is_made_again(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "PATIENCE", 60)
    monkeypatch.setattr(bench_module, "WALL_FACTOR", 1)
    bench = Bench(FILES, environment, None, suite_seconds=1.0, test_seconds=1.0)
    tests = ["test_slow.py::test_slow"]
    golden, other = bench.run_all([Trial(FILES, tests, is_golden=True), Trial(FILES, tests)])
    assert (golden.error, golden.passed) == ("", frozenset(tests))
    assert other.ran_out_of_time
    assert not other.passed


def test_a_golden_run_that_never_ends_is_ended(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "PATIENCE", 2)
    files = {"test_slow.py": b"def test_slow():\n    while True:\n        pass\n"}
    bench = Bench(files, environment, None, suite_seconds=1.0, test_seconds=1.0)
    (report,) = bench.run_all([Trial(files, ["test_slow.py::test_slow"], is_golden=True)])
    assert report.ran_out_of_time
    assert "2 s" in report.error


BUSY = """
import time

def test_works_for_a_moment():
    begin, end = time.process_time(), time.monotonic() + 1.5
    while time.process_time() - begin < 0.2:
        pass
    time.sleep(max(0, end - time.monotonic()))

def test_never_ends():
    while True:
        pass

def test_waits():
    time.sleep(60)
"""


def test_the_limit_is_processor_time(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "WALL_FACTOR", 100)
    files = {"test_busy.py": BUSY.encode()}
    bench = Bench(files, environment, None, suite_seconds=1.0, test_seconds=1.0)
    tests = ["test_busy.py::test_works_for_a_moment", "test_busy.py::test_never_ends"]
    moment, endless = bench.run_all([Trial(files, [test]) for test in tests])
    assert (moment.error, moment.passed) == ("", frozenset(tests[:1]))
    assert endless.ran_out_of_time
    assert not endless.passed


def test_a_run_that_waits_for_nothing_is_ended_by_the_clock(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "WALL_FACTOR", 2)
    files = {"test_busy.py": BUSY.encode()}
    bench = Bench(files, environment, None, suite_seconds=1.0, test_seconds=1.0)
    (waiting,) = bench.run_all([Trial(files, ["test_busy.py::test_waits"])])
    assert waiting.ran_out_of_time
    assert not waiting.passed
