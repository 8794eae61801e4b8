"""The options of a benchmark are what it gives as their defaults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from command_line import options

DEFAULTS = {"num_lives": 3, "rate": 0.5, "out": Path("a"), "whole": False, "sizes": [1, 2], "set": [], "way": ("x", "y")}  # fmt: skip


def test_without_words_they_are_the_defaults() -> None:
    assert vars(options("about", [], **DEFAULTS)) == {**DEFAULTS, "way": "x"}


def test_words_take_their_place_with_the_same_types() -> None:
    words = "--num-lives 4 --rate 1 --out b --whole --sizes 7 --sizes 8 9 --set k=v --set l=w --way y".split()
    given = vars(options("about", words, **DEFAULTS))
    lists = {"sizes": [7, 8, 9], "set": ["k=v", "l=w"]}
    assert given == {"num_lives": 4, "rate": 1.0, "out": Path("b"), "whole": True, "way": "y", **lists}


@pytest.mark.parametrize(
    "words", [["--rate", "much"], ["--way", "z"], ["--sizes"], ["--nothing"], ["--help"]]
)
def test_help_and_what_does_not_fit_end_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options("What it measures: 5 %.", words, **DEFAULTS)
    assert ended.value.code == (0 if words == ["--help"] else 2)
    shown = capsys.readouterr().out
    assert not shown or ("5 %." in shown and "default: 1 2" in shown and "default: none" in shown)
