"""A run's limit is processor time: what computes too long is ended, what waits for a busy machine is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.records import Outcome
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.test_run import TestReport, run_tests

pytestmark = pytest.mark.timeout(600)
WAITS = "import time\ndef test_it():\n    time.sleep(3)\n"
COMPUTES = "def test_it():\n    while True:\n        pass\n"
IGNORES = "import signal\ndef test_it():\n    signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n    while True:\n        pass\n"


def run(
    tmp_path: Path, environment: Environment, text: str, seconds: float, factor: float | None
) -> TestReport:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "test_it.py").write_text(text)
    return run_tests(tree, environment, ["test_it.py::test_it"], timeout_seconds=seconds, wall_factor=factor)


@pytest.mark.long
def test_waiting_is_no_computing(tmp_path: Path, environment: Environment) -> None:
    report = run(tmp_path, environment, WAITS, 2, 240)
    assert (report.error, dict(report.outcomes)) == ("", {"test_it.py::test_it": Outcome.PASSED})
    assert 0 < report.cpu_seconds < 2


def test_by_the_clock_it_would_be_too_long(tmp_path: Path, environment: Environment) -> None:
    report = run(tmp_path, environment, WAITS, 2, None)
    assert report.ran_out_of_time
    assert report.error.startswith("the tests ran longer than 2 s")


@pytest.mark.long
@pytest.mark.parametrize("text", [COMPUTES, IGNORES])
def test_what_computes_is_ended(tmp_path: Path, environment: Environment, text: str) -> None:
    report = run(tmp_path, environment, text, 1, 500)
    assert report.error
    assert dict(report.outcomes) == {"test_it.py::test_it": Outcome.FAILED}
    if text == COMPUTES:
        assert report.ran_out_of_time
