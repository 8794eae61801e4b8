"""Tests that are not green whatever the order and the day are named, counted and left out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.cli.tasks_verb import finish_build, run_stats
from composer_replication.cli.terminal import columns
from composer_replication.records import Outcome
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.intake.environment import Environment, UnusableRepository
from composer_replication.tasks.intake.sources import open_source
from composer_replication.tasks.repository import prepare
from composer_replication.tasks.running.bench import run_alone
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord
from composer_replication.tasks.test_run import TestReport, Trial

MakeProject = Callable[[Mapping[str, str]], Path]

STATE = "seen = []\n\n\ndef one():\n    return 11\n"
IN_FILE_ORDER_ONLY = {
    "planted.py": STATE,
    "test_a.py": "import planted\n\n\ndef test_first():\n    planted.seen.append(1)\n\n\n"
    "def test_needs_first():\n    assert planted.seen\n\n\ndef test_one():\n    assert planted.one() == 11\n",
}
ACROSS_FILES = {
    "planted.py": STATE,
    "test_a.py": "import planted\n\n\ndef test_victim():\n    assert not planted.seen\n",
    "test_b.py": "import planted\n\n\ndef test_polluter():\n    planted.seen.append(1)\n",
    "test_c.py": "import planted\n\n\ndef test_one():\n    assert planted.one() == 11\n",
}
# Each of the tests by chance is green three times, or never, in one of four cases; all 40 are in one of 10^24.
MIXED = {
    "planted.py": "seen, begun = [], []\n\n\ndef one():\n    return 11\n",
    "test_chance.py": "import os, random\n\nimport planted\nimport pytest\n\n\n"
    "@pytest.mark.parametrize('i', range(20))\ndef test_urandom(i):\n    assert os.urandom(1)[0] % 2\n\n\n"
    "@pytest.mark.parametrize('i', range(20))\ndef test_random(i):\n    assert random.random() < 0.5\n\n\n"
    "@pytest.mark.parametrize('i', range(60))\ndef test_one(i):\n    assert planted.one() == 11\n",
    "test_order.py": "import planted\n\n\ndef test_polluter():\n    planted.seen.append(1)\n\n\n"
    "def test_victim():\n    assert not planted.seen\n",
    "test_red.py": "import pytest\n\n\ndef test_red():\n    assert False\n\n\n@pytest.mark.skip\n"
    "def test_skipped():\n    pass\n",
    "test_end.py": "import os\n\nimport planted\n\n\ndef test_begins():\n    planted.begun.append(1)\n\n\n"
    "def test_leaves():\n    if not planted.begun:\n        os._exit(0)\n",
}
NESTED = {
    "planted.py": "sets = []\n",
    "sub/test_x.py": "def test_x1(): pass\ndef test_x2(): pass\ndef test_x3(): pass\n",
    "test_y.py": "import planted, pytest\n\n\n@pytest.fixture(scope='module', autouse=True)\ndef once():\n"
    "    planted.sets.append('module')\n    assert planted.sets.count('module') == 1\n\n\n"
    "def test_y1(): pass\ndef test_y2(): pass\n\n\nclass TestY:\n"
    "    @pytest.fixture(scope='class', autouse=True)\n    def once_a_class(self):\n"
    "        planted.sets.append('class')\n        assert planted.sets.count('class') == 1\n\n"
    "    def test_y3(self): pass\n    def test_y4(self): pass\n    def test_y5(self): pass\n\n\n"
    "def test_y6(): pass\n",
    "test_z.py": "import unittest\n\n\nclass TestZ(unittest.TestCase):\n    times = 0\n\n    @classmethod\n"
    "    def setUpClass(cls):\n        cls.times += 1\n        assert cls.times == 1\n\n"
    "    def test_z1(self): pass\n    def test_z2(self): pass\n",
    "test_p.py": "import pytest\n\n\n@pytest.mark.parametrize('i', [0, 1, 2])\ndef test_p(i): pass\n",
}


def record_of(project: Path, tmp_path: Path, *, jobs: int = 2) -> RepositoryRecord:
    store = TaskStore.create(tmp_path / "store")
    return prepare(open_source(str(project)), store, jobs=jobs).record


@pytest.fixture
def run(environment: Environment) -> Callable[..., TestReport]:
    def run_files(
        files: Mapping[str, str], *, seed: int | None = None, backwards: bool = False
    ) -> TestReport:
        tree = {name: text.encode() for name, text in files.items()}
        return run_alone(Trial(tree, None, 60.0, shuffle_seed=seed, backwards=backwards), environment)

    return run_files


@pytest.mark.long
@pytest.mark.parametrize(
    ("files", "flaky"),
    [(IN_FILE_ORDER_ONLY, "test_a.py::test_needs_first"), (ACROSS_FILES, "test_a.py::test_victim")],
)
def test_tests_that_hang_on_the_order(
    files: Mapping[str, str], flaky: str, make_project: MakeProject, tmp_path: Path, run
) -> None:
    record = record_of(make_project(files), tmp_path)
    assert record.flaky == (flaky,)
    assert flaky not in record.places
    assert len(record.green) == record.num_collected - 1
    # The order of the files alone, which was all that was tried before, shows nothing.
    assert all(flaky in run(files).passed for _ in range(2))


def test_flaky_red_and_skipped_tests_and_one_that_ends_a_run_are_told_apart(
    make_project: MakeProject, tmp_path: Path
) -> None:
    record = record_of(make_project(MIXED), tmp_path)
    flaky = {test for test in record.flaky if "chance" not in test} - set(record.left_out)
    assert flaky == {"test_order.py::test_victim"}
    assert len(record.flaky) > 1  # by chance, and none of them is used
    assert not any("test_one" in test for test in record.flaky)
    assert record.green.isdisjoint(record.flaky)
    used = {test.partition("[")[0] for test in record.green if "random" not in test}
    assert used == {"test_chance.py::test_one", "test_order.py::test_polluter", "test_end.py::test_begins"}
    assert record.left_out == ("test_end.py::test_leaves",)


def test_a_suite_that_is_mostly_flaky_is_refused(make_project: MakeProject, tmp_path: Path) -> None:
    needy = "".join(f"def test_needy_{i}():\n    assert planted.seen\n\n\n" for i in range(3))
    files = {
        "planted.py": STATE,
        "test_a.py": f"import planted\n\n\ndef test_first():\n    planted.seen.append(1)\n\n\n{needy}",
    }
    # The shuffle is fixed, and backwards it puts the three on the other side of the first one.
    with pytest.raises(UnusableRepository, match="green in all of three runs") as caught:
        record_of(make_project(files), tmp_path)
    assert caught.value.reason == "red-baseline"


@pytest.mark.long
def test_orders_are_drawn_by_the_seed_and_keep_groups_together(run) -> None:
    in_files, drawn, again = run(NESTED), run(NESTED, seed=0), run(NESTED, seed=0)
    backwards = run(NESTED, seed=0, backwards=True)
    for report in (in_files, drawn, again, backwards):
        assert (report.error, set(report.outcomes.values())) == ("", {Outcome.PASSED})
        assert set(report.collected) == set(in_files.collected)
        assert tuple(report.outcomes) == report.collected
        for depth in (1, 2):  # modules, then classes: a group that were torn apart would come twice
            parts = [test.rpartition("[")[0] or test for test in report.collected]
            groups = [key for key, _ in groupby(part.split("::")[:depth] for part in parts)]
            named = [tuple(key) for key in groups if len(key) == depth and (depth == 1 or "Test" in key[-1])]
            assert len(named) == len(set(named))
    assert again.collected == drawn.collected != in_files.collected
    assert backwards.collected == drawn.collected[::-1]
    assert len({drawn.collected, *(run(NESTED, seed=seed).collected for seed in (1, 2))}) == 3


def test_an_order_that_the_repository_asks_for_wins(run) -> None:
    conftest = "def pytest_collection_modifyitems(items):\n    items.sort(key=lambda item: item.nodeid)\n"
    report = run({**NESTED, "conftest.py": conftest}, seed=0)
    assert report.collected == tuple(sorted(report.collected))


RED = {
    "pyproject.toml": '[project]\nname = "planted"\nversion = "1.0"\n',
    "planted.py": "def one():\n    return 11\n",
    "test_planted.py": "import pytest\n\nimport planted\n\n\ndef test_one():\n    assert planted.one() == 11\n\n\n"
    "def test_again():\n    assert planted.one() < 12\n\n\ndef test_nothing():\n    pass\n\n\n"
    "def test_data():\n    open('testdata/a.json')\n\n\ndef test_more():\n    open('testdata/a.json')\n\n\n"
    "@pytest.mark.skip(reason='not here')\ndef test_skipped():\n    pass\n",
    "tests/test_broken.py": "import not_to_be_found\n",
    "tests/data.xz": "no archive",
}


def test_they_are_counted_and_explained(tmp_path: Path) -> None:
    built = build_tasks([str(write_tree(tmp_path / "planted", RED))], tmp_path / "out", jobs=1)
    found = dict(built.unused_tests["planted==1.0"])
    reason = found.pop("first_reason")
    assert reason.startswith("tests/test_broken.py: ModuleNotFoundError: ")
    counts = {"collected": 6, "used": 3, "flaky": 0, "never_green": 3, "broken_files": 1, "left_out": []}
    assert found == counts
    result, _ = finish_build(built, {}, quiet=True)
    stats, _ = run_stats(argparse.Namespace(folder=built.folder))
    assert stats["unused_tests"] == {"planted==1.0": counts}
    for shown, told in ((result, f"first_reason {reason}"), (stats, "")):
        lines = columns(shown).splitlines()
        (line,) = [line for line in lines if line.startswith("  planted==1.0: collected 6")]
        assert all(words in line for words in ("never_green 3", "broken_files 1", told))
