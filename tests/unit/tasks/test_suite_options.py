"""A suite runs as its repository declares, with what is left out of every environment taken out of the declaration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.tasks.intake.environment import Environment, UnusableRepository
from composer_replication.tasks.repository import run_suite
from composer_replication.tasks.running.bench import Bench, run_alone
from composer_replication.tasks.suite_options import suite_arguments
from composer_replication.tasks.test_run import TestReport, Trial

ONE = "def test_one():\n    pass\n"


@pytest.fixture
def run(environment: Environment):
    def run_files(files: Mapping[str, str]) -> TestReport:
        return run_alone(
            Trial({name: text.encode() for name, text in files.items()}, None, 60.0), environment
        )

    return run_files


@pytest.mark.parametrize(
    ("added", "kept"),
    [
        ("--asyncio-mode=auto --strict-markers", ["--asyncio-mode=auto"]),
        ("--asyncio-mode auto -p my.plugin", ["--asyncio-mode=auto", "-pmy.plugin"]),
        ("-pno:doctest --ds=a.settings --nomigrations", ["-pno:doctest", "--ds=a.settings", "--nomigrations"]),
        ("-v --import-mode=importlib", ["--import-mode=importlib"]),
        ("--cov=a --cov b --cov-report term-missing:skip-covered --no-cov-on-fail", []),
        ("-n auto --dist loadfile -n4 --maxfail=1 -x -ra -r fE --tb short -q -vv -W error", []),
        ("--junitxml report.xml --durations 10 --durations-min=1 --showlocals --color=yes --reruns 3", []),
        ("--doctest-modules src -m 'not slow' -k 'a or b'", ["-mnot slow", "-ka or b"]),
        ("-o asyncio_mode=auto --ignore=a --deselect b::c -xvs", ["-oasyncio_mode=auto", "--ignore=a", "--deselect=b::c", "-s"]),
        ("--benchmark-columns=min --benchmark-disable --run-slow", ["--benchmark-disable", "--run-slow"]),
        ("--odd 'quote", ["--odd='quote"]),
    ],
)  # fmt: skip
def test_options_that_a_suite_needs_are_kept_and_reports_are_not(
    added: str, kept: list[str], tmp_path: Path
) -> None:
    write_tree(tmp_path, {"pytest.ini": f"[pytest]\naddopts = {added}\n", "test_a.py": ONE})
    assert suite_arguments(tmp_path) == ["--config-file=pytest.ini", *kept]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytest.toml", "[pytest]\naddopts = ['--mine']\n"),
        (".pytest.toml", "[pytest]\naddopts = ['--mine']\n"),
        ("pytest.ini", "[pytest]\naddopts = --mine\n"),
        (".pytest.ini", "[pytest]\naddopts =\n    --mine\n"),
        ("pyproject.toml", "[tool.pytest]\naddopts = ['--mine']\n"),
        ("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '--mine'\n"),
        ("tox.ini", "[tox]\n[pytest]\naddopts = --mine\n"),
        ("setup.cfg", "[tool:pytest]\naddopts = --mine\n"),
        ("tests/pytest.ini", "[pytest]\naddopts = --mine\n"),
    ],
)
def test_every_place_where_pytest_reads_them(name: str, text: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {name: text, "tests/test_a.py": ONE})
    assert suite_arguments(tmp_path) == [f"--config-file={name}", "--mine"]
    if not name.startswith(("tests/", "setup.cfg")):
        (tmp_path / "setup.cfg").write_text("[tool:pytest]\naddopts = --other\n")
        assert suite_arguments(tmp_path) == [f"--config-file={name}", "--mine"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pytest.toml", ""),
        ("pytest.ini", "[other]\n"),
        ("tox.ini", "[pytest]\n"),
        ("pyproject.toml", "[tool.pytest.ini_options]\n"),
    ],
)
def test_a_file_that_pytest_chooses_counts_where_it_says_nothing(
    name: str, text: str, tmp_path: Path
) -> None:
    others = {"setup.cfg": "[tool:pytest]\naddopts = --other\n", "tests/test_a.py": ONE}
    assert suite_arguments(write_tree(tmp_path, {name: text, **others})) == [f"--config-file={name}"]


@pytest.mark.parametrize(
    ("files", "patterns"),
    [
        ({"tests/test_a.py": ONE}, ""),
        ({"tests/test_a.py": ONE, "setup.py": "setup(test_suite='tests')"}, "test_*.py *_test.py test*.py"),
        ({"tests/test_a.py": ONE, "tox.ini": "[testenv]\ncommands = python -m unittest discover -s t -p 'check_*.py'"}, "test_*.py *_test.py check_*.py"),
        ({"noxfile.py": "s.run('python', '-m', 'unittest', 'discover')", "tests/testa.py": ONE}, "test_*.py *_test.py test*.py"),
        ({"noxfile.py": "s.run('python', '-m', 'unittest', 'discover', '-p', '*_spec.py')"}, "test_*.py *_test.py *_spec.py"),
        ({"tests/testa.py": ONE}, "test_*.py *_test.py test*.py *_tests.py tests_*.py *Test.py *Tests.py"),
        ({"pytest.ini": "[pytest]\npython_files = a.py", "a.py": ONE}, ""),
    ],
)  # fmt: skip
def test_files_are_found_by_the_names_that_unittest_is_told(
    files: dict[str, str], patterns: str, tmp_path: Path
) -> None:
    found = [word for word in suite_arguments(write_tree(tmp_path, files)) if "python_files" in word]
    assert found == ([f"-opython_files={patterns}"] if patterns else [])


def test_where_nothing_is_collected_the_names_that_were_tried_are_said(environment: Environment) -> None:
    files = {
        "pytest.ini": b"[pytest]\npython_functions = it_\n    they_\n",
        "tests/test_a.py": b"def test_one():\n    pass\n",
    }
    bench = Bench(files, environment, None, 60.0, 20.0)
    with pytest.raises(UnusableRepository, match="red-baseline") as caught:
        run_suite(bench)
    words = "no test is collected, looked for by files test_*.py *_test.py; functions it_ they_; classes Test*; below ."
    assert caught.value.detail == words


STRICT = """
[pytest]
addopts = --strict-markers --strict-config --nonsense --reruns 3 -p xdist -p mine --own=7 --flag yes
filterwarnings = error
required_plugins = pytest-cov
minversion = 99.0
strict_config = true
strict = true
reruns = 1
"""
OWN = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--own")
    parser.addoption("--flag", action="store_true")

def pytest_xdist_auto_num_workers(config):
    return 2

@pytest.fixture
def cov():
    return "of the repository"
"""
USES = """
import warnings

import pytest

@pytest.mark.unheard_of
def test_all(benchmark, worker_id, testrun_uid, no_cover, cov, extras, hour, pytestconfig):
    warnings.warn("x")
    assert benchmark(max, 1, 2) == 2
    assert benchmark.pedantic(max, setup=lambda: ((3, 4), {}), rounds=3) == 4
    assert (worker_id, cov, extras, hour) == ("master", "of the repository", [], 3600)
    assert (pytestconfig.getoption("--own"), pytestconfig.getoption("--flag")) == ("7", True)
"""


def test_strict_settings_and_left_out_tools_do_not_end_a_run(run) -> None:
    plugin = "import pytest\n\n\n@pytest.fixture\ndef hour():\n    return 3600\n"
    report = run({"pytest.ini": STRICT, "conftest.py": OWN, "mine.py": plugin, "test_a.py": USES})
    assert (report.error, dict(report.why), len(report.passed)) == ("", {}, 1)


def test_the_import_mode_counts(run) -> None:
    config = "[pytest]\naddopts = -v --import-mode=importlib\n"
    report = run({"pytest.ini": config, "a/test_same.py": ONE, "b/test_same.py": ONE})
    assert (dict(report.collect_errors), len(report.passed)) == ({}, 2)


def test_a_plugin_of_the_tree_loads_by_its_entry_point(run) -> None:
    files = {
        "mine.py": "import pytest\n\n\n@pytest.fixture\ndef hour():\n    return 3600\n",
        "mine-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1\n",
        "mine-1.dist-info/entry_points.txt": "[pytest11]\nodd = mine\n",
        "test_a.py": "def test_hour(hour):\n    assert hour == 3600\n",
    }
    assert len(run(files).passed) == 1
