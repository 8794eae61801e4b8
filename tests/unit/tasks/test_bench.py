"""A golden run that a busy machine made too slow gets a second, longer one; others do not."""

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
