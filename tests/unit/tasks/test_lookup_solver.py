"""Which constants pass recorded behaviour, and what a table of the recorded calls does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.twin import twin_run
from composer_replication.tasks.twin.twin_run import TABLE, JobReport, Twin, Vector, solver_that_passes

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
    report = JobReport("", digests=[" ".join(STUB_EXPRESSIONS)] * len(twin.vectors))
    passing = [text for text in STUB_EXPRESSIONS if set(recorded) == {text} and mutated.count(text) >= enough]
    table = [TABLE] if mutated.count("None") >= enough else []
    assert solver_that_passes(twin, report) == [*passing, *table, ""][0]


def test_a_call_that_cannot_be_made_again_agrees_with_no_constant() -> None:
    twin = twin_of(["None"] * 2, ["None"] * 12)
    texts = [" ".join(STUB_EXPRESSIONS)] * 14
    assert solver_that_passes(twin, JobReport("", digests=texts)) == "None"
    for bad in ("", "None"):
        assert solver_that_passes(twin, JobReport("", digests=[texts[0], bad, *texts[2:]])) == TABLE
    assert solver_that_passes(twin, JobReport()) == ""


@pytest.mark.parametrize(("error", "reason"), [("late", "late"), ("", "a stub passes")])
def test_a_run_that_broke_gives_no_twin(error: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = twin_of(["None"] * 6, ["None"] * 12)
    report = JobReport(error, digests=[" ".join(STUB_EXPRESSIONS)] * 18)
    monkeypatch.setattr(twin_run, "play", lambda *_, **__: [report])
    build = twin_run._Build(None, 0, ())  # type: ignore[arg-type]
    assert build.sift([twin_run.Job(twin, twin_run.CONSTANTS)], twin_run.strong) == []
    assert build.without == {"pin": reason}
