"""Tests that are never green are counted with the first reason; a store without the note says what its record says."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from small_trees import write_tree

from composer_replication.cli.tasks_verb import finish_build, run_stats
from composer_replication.cli.terminal import columns
from composer_replication.tasks.build import BuildSummary, build_tasks

RED = {
    "pyproject.toml": '[project]\nname = "planted"\nversion = "1.0"\n',
    "planted.py": "def one():\n    return 11\n",
    "test_planted.py": "import pytest\n\nimport planted\n\n\ndef test_one():\n    assert planted.one() == 11\n\n\n"
    "def test_again():\n    assert planted.one() < 12\n\n\ndef test_nothing():\n    pass\n\n\n"
    "def test_data():\n    open('testdata/a.json')\n\n\ndef test_more():\n    open('testdata/a.json')\n\n\n"
    "@pytest.mark.skip(reason='not here')\ndef test_skipped():\n    pass\n",
    "tests/test_broken.py": "import not_to_be_found\n",
    "tests/data.zip": "no archive",
}


def source(folder: Path) -> str:
    write_tree(folder / "planted", RED)
    return str(folder / "planted")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildSummary:
    folder = tmp_path_factory.mktemp("unused")
    return build_tasks([source(folder)], folder / "out", jobs=1)


def test_they_are_counted_and_explained(built: BuildSummary) -> None:
    found = built.unused_tests["planted==1.0"]
    assert (found.collected, found.used, found.flaky, found.never_green, found.broken_files) == (
        6,
        3,
        0,
        2,
        1,
    )
    assert found.first_reason.startswith("tests/test_broken.py: ModuleNotFoundError: ")
    assert found.left_out == ("tests/data.zip",)
    result, _ = finish_build(built, {}, quiet=True)
    stats, _ = run_stats(argparse.Namespace(folder=built.folder))
    assert stats["unused_tests"] == result["unused_tests"]
    told = ("never_green 2", "broken_files 1", f"first_reason {found.first_reason}")
    for shown in (result, stats):
        (line,) = [
            line for line in columns(shown).splitlines() if line.startswith("  planted==1.0: collected 6")
        ]
        assert all(words in line for words in told)
