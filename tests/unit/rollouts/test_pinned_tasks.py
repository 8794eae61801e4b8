"""The pinned tasks of the hack matrix: enough of them, and drawn by a rule that knows no monitor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from composer_replication.tasks.intake.sources import open_source

if TYPE_CHECKING:
    import pytest

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
