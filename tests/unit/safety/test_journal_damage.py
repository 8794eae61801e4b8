"""A journal that is not as it was written is refused, and says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError
from composer_replication.safety import EvaluationJournal, EvaluationScores
from composer_replication.safety.evaluation_journal import _link


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_flipped_bit_before_the_last_line_break_is_noticed(place: int, bit: int) -> None:
    data = bytearray(WHOLE)
    place %= len(data) - 1
    data[place] ^= 1 << bit
    path = FOLDER / "journal.jsonl"
    path.write_bytes(data)
    true = [EvaluationScores(1, ((1.0, 0.5),), (0.0,)), EvaluationScores(2, ((0.0, 0.0),))]
    try:
        read = list(EvaluationJournal(path).evaluations)
    except InputError:
        return
    assert read == true[: len(read)]  # a broken line break looks torn, and other white space says nothing


@pytest.fixture(scope="module", autouse=True)
def _journal_to_damage(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER, WHOLE  # noqa: PLW0603  hypothesis calls the test many times within one fixture
    FOLDER = tmp_path_factory.mktemp("damage")
    journal = EvaluationJournal(FOLDER / "whole.jsonl")
    journal.record_evaluation(1, [(1.0, 0.5)], [0.0])
    journal.record_evaluation(2, [(0.0, 0.0)])
    WHOLE = (FOLDER / "whole.jsonl").read_bytes()


FOLDER: Path
WHOLE: bytes


def test_a_line_taken_out_put_in_twice_or_moved_is_refused(tmp_path: Path) -> None:
    lines = WHOLE.splitlines(keepends=True)
    path = tmp_path / "journal.jsonl"
    for damaged in (
        [lines[0], lines[2]],
        [*lines, lines[2]],
        [lines[0], lines[2], lines[1]],
        lines[1:],
        [*lines[:2], b"\n", lines[2]],
        [*lines, b"[]\n"],
        [*lines, b"\xff\n"],
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(InputError, match="CR0602") as caught:
            EvaluationJournal(path)
        assert caught.value.where.startswith(f"{path}:")


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "other", "step": 3},
        {"kind": "pair", "step": 3, "draw": 0, "scores": [1.0]},
        {"kind": "pair", "step": 3, "draw": 0},
        {"kind": "end", "step": 3, "num": 4},
        {"kind": "pair"},
    ],
)
def test_a_line_that_makes_no_sense_is_refused_even_with_a_fitting_hash(tmp_path: Path, row: Any) -> None:
    chain = json.loads(WHOLE.splitlines()[-1])["chain"]
    path = tmp_path / "journal.jsonl"
    path.write_bytes(WHOLE + json.dumps({**row, "chain": _link(chain, row)}).encode() + b"\n")
    with pytest.raises(InputError, match="CR0602"):
        EvaluationJournal(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    for row in ({"kind": "journal", "version": 2, "run": ""}, {"kind": "diary", "version": 1, "run": ""}):
        path = tmp_path / "journal.jsonl"
        path.write_bytes(json.dumps({**row, "chain": _link("", row)}).encode() + b"\n")
        with pytest.raises(InputError, match="it begins with"):
            EvaluationJournal(path)


def test_another_runs_journal_is_refused_with_both_names(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    EvaluationJournal(path, run="split-a").record_pair(1, 0, 1.0, 1.0)
    with pytest.raises(InputError, match=r"split-a.*split-b") as caught:
        EvaluationJournal(path, run="split-b")
    assert caught.value.code == "CR0603"
    assert EvaluationJournal(path, run="split-a").open_draws == {0}
