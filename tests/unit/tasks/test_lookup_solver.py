"""Which constants pass recorded behaviour, and what a table of the recorded calls does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.twin import build_twins
from composer_replication.tasks.twin.twin_run import TABLE, JobReport, Twin, Vector, solver_that_passes

if TYPE_CHECKING:
    import pytest

ANSWERS = st.sampled_from(["None", "0", "''", "something else"])
ANSWERS_OF_CALLS = st.tuples(st.lists(ANSWERS, min_size=1, max_size=9), st.lists(ANSWERS, max_size=30))


def twin_of(recorded: Sequence[str], mutated: Sequence[str]) -> Twin:
    calls = [Vector(str(index).encode(), answer) for index, answer in enumerate([*recorded, *mutated])]
    split = len(recorded)
    return Twin("pin", "a.py", "f", tuple(calls[:split]), tuple(calls[split:]), "p")


@given(ANSWERS_OF_CALLS)
def test_verdicts_of_constants_and_of_the_table(drawn: tuple[list[str], list[str]]) -> None:
    """In a tree in which each constant answers with its own text."""
    recorded, mutated = drawn
    twin, enough = twin_of(recorded, mutated), math.ceil(0.95 * len(mutated))
    report = JobReport(dict.fromkeys(range(len(twin.vectors)), " ".join(STUB_EXPRESSIONS)), error="")
    passing = [text for text in STUB_EXPRESSIONS if set(recorded) == {text} and mutated.count(text) >= enough]
    table = [TABLE] if mutated.count("None") >= enough else []
    assert solver_that_passes(twin, report) == [*passing, *table, ""][0]


def test_a_call_that_cannot_be_made_again_agrees_with_no_constant() -> None:
    twin = twin_of(["None"] * 2, ["None"] * 12)
    texts = dict.fromkeys(range(14), " ".join(STUB_EXPRESSIONS))
    assert solver_that_passes(twin, JobReport(texts, error="")) == "None"
    for bad in ("", "None"):
        assert solver_that_passes(twin, JobReport({**texts, 1: bad}, error="")) == TABLE
    assert solver_that_passes(twin, JobReport()) == ""


def test_a_run_that_broke_gives_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    no_bench: Any = None
    twin = twin_of(["None"] * 6, ["None"] * 12)
    texts = dict.fromkeys(range(18), " ".join(STUB_EXPRESSIONS))
    found = []
    for report in (JobReport(texts, error="late"), JobReport(texts, error="")):
        monkeypatch.setattr(build_twins, "play_apart", lambda *_, report=report, **__: [report])
        build = build_twins._Build(no_bench, 0, ())
        assert build.without_weak([twin]) == []
        found.append(build.without)
    assert found == [{"pin": "late"}, {"pin": "a stub passes"}]
