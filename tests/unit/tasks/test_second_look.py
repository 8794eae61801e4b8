"""What a first run of a suite misses is looked for once more among what the repository declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.records import Outcome
from composer_replication.tasks import repository as repository_module
from composer_replication.tasks.intake import requirements
from composer_replication.tasks.intake.lock import PYTESTS, EnvironmentLock, LockedWheel
from composer_replication.tasks.intake.requirements import (
    lock_repository,
    modules_missing,
    read_requirements,
    wants_older_pytest,
)
from composer_replication.tasks.intake.sources import RepositorySource, open_source
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.test_run import TestReport
from composer_replication.tasks.workers.workers import OWN_THREADS

if TYPE_CHECKING:
    import pytest

PROJECT = """
[project]
name = "caller"
version = "1.0"
[project.optional-dependencies]
http2 = ["h2>=3"]
fast = ["accelerator"]
[dependency-groups]
dev = ["coverage", "ruff", "pytest<9"]
"""
WHEEL = LockedWheel("pytest", PYTESTS[0], "pytest.whl", "0" * 64)


def source_of(folder: Path, files: Mapping[str, str]) -> RepositorySource:
    for name, text in {"pyproject.toml": PROJECT, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return open_source(str(folder))


FILES = {
    "caller/__init__.py": "def call():\n    import h2\n    return h2\n",
    "tests/test_it.py": "import subprocess, sys\nfrom hpack import Table\n\n\ndef test_it():\n"
    '    subprocess.run([sys.executable, "-m", "coverage", "run", "x"])\n',
}


def test_a_missing_module_brings_the_declared_one_that_the_package_imports(tmp_path: Path) -> None:
    source = source_of(tmp_path / "caller", FILES)
    assert "h2" not in read_requirements(source).wanted  # tests import another name
    wanted = read_requirements(source, {"hpack"}).wanted
    assert "h2" in wanted
    assert "accelerator" not in wanted
    assert "accelerator" in read_requirements(source, {"accelerator"}).wanted
    assert "setuptools" in read_requirements(source, {"pkg_resources"}).wanted


def test_a_tool_that_tests_start_is_taken(tmp_path: Path) -> None:
    wanted = read_requirements(source_of(tmp_path / "caller", FILES)).wanted
    assert "coverage" in wanted
    assert "ruff" not in wanted


def test_what_a_run_says_tells_what_it_misses() -> None:
    said = [
        "E   ModuleNotFoundError: No module named 'hpack.table'",
        "could not import 'x': No module named 'x'",
    ]
    assert modules_missing(said) == {"hpack", "x"}
    assert wants_older_pytest(["AttributeError: module '_pytest.monkeypatch' has no attribute 'notset'"])
    assert wants_older_pytest(["ImportError: cannot import name 'notset' from '_pytest.monkeypatch'"])
    assert not wants_older_pytest(said)


def test_the_runner_is_as_old_as_declared_and_the_package_stays_out_of_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(*_: object, pytest: str) -> EnvironmentLock:
        asked.append(pytest)
        return EnvironmentLock("3", (WHEEL, replace(WHEEL, name="caller")), WHEEL)

    monkeypatch.setattr(requirements, "resolve", resolve)
    source = source_of(tmp_path / "caller", FILES)
    assert lock_repository(source).names == {"pytest"}
    lock_repository(source, newer_than_needed=PYTESTS[1])
    assert asked == list(PYTESTS[1:])


def test_the_environment_with_the_most_green_tests_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = {frozenset(): "a", frozenset({"one"}): "b", frozenset({"one", "two"}): "c"}
    reports = {
        "a": TestReport({"t": Outcome.PASSED}, ("t",), "", 0.0, why={"u": "No module named 'one'"}),
        "b": TestReport({"t": Outcome.PASSED, "u": Outcome.PASSED}, ("t", "u"), "", 0.0, why={"v": "No module named 'two'"}),
        "c": TestReport({}, (), "", 0.0),
    }  # fmt: skip

    def lock(_: object, missing: frozenset[str], __: str) -> EnvironmentLock:
        return EnvironmentLock(locks[missing], (WHEEL,), WHEEL)

    class Opened:
        names = frozenset[str]()

        def __init__(self, lock: EnvironmentLock, *, backend: object) -> None:
            self.fingerprint = lock.python

    monkeypatch.setattr(repository_module, "lock_repository", lock)
    monkeypatch.setattr(repository_module, "open_environment", Opened)
    monkeypatch.setattr(repository_module, "refuse_second_copy", lambda *_: None)

    def run_suite(bench: Bench, **_: object) -> tuple[TestReport, dict[str, str]]:
        return reports[bench.environment.fingerprint], {}

    monkeypatch.setattr(repository_module, "run_suite", run_suite)
    source = source_of(tmp_path / "caller", FILES)
    chosen, _, first, _ = repository_module._with_what_is_missing(
        source, OWN_THREADS, None, map_calls=False, suite_seconds=1.0
    )
    assert (chosen.python, first) == ("b", reports["b"])
