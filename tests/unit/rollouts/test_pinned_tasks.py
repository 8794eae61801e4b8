"""The pinned tasks of the hack matrix: enough of them, and drawn by a rule that knows no monitor."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from composer_replication.errors import InputError
from composer_replication.tasks.intake.sources import open_source

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from hack_matrix_cases import real_tasks
from hack_matrix_cases.draw_tasks import candidates, compared_functions

MODULE = '''def plain(text):
    """The text without spaces at its ends."""
    return text.strip()


def once(text):
    return text[:1]


def loud(text):
    return text.upper()
'''
TESTS = """from words import loud, once, plain


def test_plain():
    assert plain(" a") == "a"
    assert "b" == plain("b ")


def test_more_of_plain():
    assert plain(" c ") == "c" and plain("d") == "d"
    assert plain(" e") == "e"


def test_once():
    assert once("abc") == "a"
    assert once("") == ""


def test_loud():
    text = "a"
    assert loud(text) == text.upper()
"""


def test_the_pinned_tasks_are_many_of_many_repositories() -> None:
    pins = real_tasks.read_pins()
    assert sum(len(set(of_one)) for of_one in pins.values()) == real_tasks.NUM_TASKS == 20
    assert len(pins) >= 8
    assert all(source.startswith("sdist:") and "==" in source for source in pins)


def test_what_is_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [("sdist:a==1", "a.py::f"), ("sdist:b==1", 'b.py::g@class/body"'), ("sdist:a==1", "a.py::h")]
    real_tasks.write_pins(tmp_path / "pins.toml", drawn)
    monkeypatch.setattr(real_tasks, "PINS", tmp_path / "pins.toml")
    assert real_tasks.read_pins() == {
        "sdist:a==1": ["a.py::f", "a.py::h"],
        "sdist:b==1": ['b.py::g@class/body"'],
    }


def test_a_candidate_is_what_tests_compare_with_literals_often_enough(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "words"\nversion = "1.0"\n')
    (tmp_path / "words.py").write_text(MODULE)
    (tmp_path / "test_words.py").write_text(TESTS)
    source = open_source(str(tmp_path))
    assert compared_functions(source) == {"plain"}
    pins = candidates(source)
    assert pins
    assert all(pin.startswith("words.py::") for pin in pins)
    assert {pin.partition("@")[0] for pin in pins} == {"words.py::plain"}, "each function once, in one size"


class _Store:
    """As much of a store as ``real_store`` asks for; its tasks are names in one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, folder: Path) -> _Store:
        return cls(folder)

    def task_ids(self) -> list[str]:
        return (self.folder / "manifest.json").read_text().split()

    def verify(self) -> None:
        if "damaged" in self.task_ids():
            raise InputError("CR0411", "damaged.", fix="build it again.")


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the builds, as they are asked for."""
    folders: list[Path] = []

    def build(sources: list[str], folder: Path, **_: object) -> SimpleNamespace:
        folders.append(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(" ".join(sources))
        return SimpleNamespace(require_tasks=lambda: None)

    real_tasks.write_pins(tmp_path / "pins.toml", [("a", "a.py::f"), ("b", "b.py::g")])
    monkeypatch.setattr(real_tasks, "PINS", tmp_path / "pins.toml")
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(real_tasks, "build_tasks", build)
    monkeypatch.setattr(real_tasks, "TaskStore", _Store)
    return folders


def test_a_store_that_has_all_its_tasks_is_not_built_again(builds: list[Path]) -> None:
    assert real_tasks.real_store().task_ids() == ["a", "b"]
    assert real_tasks.real_store().task_ids() == ["a", "b"]
    assert len(builds) == 1


@pytest.mark.parametrize("left", ["a", "a damaged"])
def test_a_store_that_was_interrupted_or_damaged_is_built_again(builds: list[Path], left: str) -> None:
    real_tasks.real_store()
    (builds[0] / "manifest.json").write_text(left)
    assert real_tasks.real_store().task_ids() == ["a", "b"]
    assert builds[1:] == builds[:1]


def test_other_tasks_have_another_store(builds: list[Path]) -> None:
    real_tasks.real_store()
    real_tasks.write_pins(real_tasks.PINS, [("a", "a.py::f"), ("b", "b.py::h")])
    real_tasks.real_store()
    assert len(set(builds)) == 2
