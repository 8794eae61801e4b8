"""Run the tests of the contract on one backend and say how they ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from composer_replication.errors import UsageError
from composer_replication.sandbox.conformance import plugin

_MOST_WORDS = 300


@dataclass(slots=True)
class Outcome:
    """How the tests ended, by name; what did not pass, with its reason.

    Attributes:
        passed: names.
        failed: assertion or error by test.
        known_failures: reason by test: the backend says so, and it did fail.
        not_run: why, by test: nothing is known about it.
        unheld: guards of the self-test that do not hold; the tests that need them were not run.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    known_failures: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    unheld: tuple[str, ...] = ()

    @property
    def is_conformant(self) -> bool:
        """Every guard holds, and every test that ran passed or failed as named, and some did."""
        return bool(self.passed) and not self.failed and not self.unheld

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for set-up, call and tear-down of each test."""
        name = report.nodeid.rpartition("::")[2]
        if report.skipped and hasattr(report, "wasxfail"):
            self.known_failures[name] = report.wasxfail
        elif report.skipped:
            self.not_run[name] = _why(report)
        elif report.failed:
            self.failed[name] = _why(report)
        elif report.when == "call":
            self.passed.append(name)


def run_suite(backend: str, *, only: str = "", options: Sequence[str] = ()) -> Outcome:
    """Hold a backend to the contract.

    Args:
        backend: as for ``choose_backend``.
        only: an expression of ``pytest -k``; by default all tests.
        options: further ones of pytest.

    Raises:
        ImportError: pytest is not installed (on import of this module).
        SandboxFailure: the self-test cannot be run (CR0302).
        UsageError: ``only`` chooses no test, or is no expression (CR0206).
    """
    outcome = Outcome()
    words = [
        str(Path(__file__).parent),
        plugin.OPTION,
        backend,
        "-q",
        "--import-mode=importlib",
    ]
    words += ["-c", os.devnull, "--rootdir", str(Path(__file__).parent), "-p", "no:cacheprovider"]
    end = pytest.main([*words, *(["-k", only] if only else []), *options], plugins=[outcome, plugin])
    if only and end in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        raise UsageError(
            "CR0206",
            f"--only {only!r} chooses none of the tests of the contract.",
            where="--only",
            fix='give words of their names, as in --only "disk or memory".',
        )
    outcome.unheld = plugin.unheld_guards(backend)
    return outcome


def _why(report: pytest.TestReport) -> str:
    """One line: the reason of a skip, or the last line of a failure."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")[:_MOST_WORDS]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return (text.strip().splitlines() or ["no reason"])[0][:_MOST_WORDS]
