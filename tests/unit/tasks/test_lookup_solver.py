"""Which constants pass recorded behaviour, and what a table of the recorded calls does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS
from composer_replication.tasks.twin.twin_run import Job, JobReport, Twin, Vector, play_stubs

ANSWERS = st.sampled_from(["None", "0", "''", "something else"])
TWINS = st.lists(
    st.tuples(st.lists(ANSWERS, min_size=1, max_size=9), st.lists(ANSWERS, max_size=30)),
    min_size=1,
    max_size=3,
)


def answers(jobs: Sequence[Job]) -> list[JobReport]:
    """A player in whose tree each constant answers with its own text."""
    texts = [" ".join(job.options["constants"]) for job in jobs]
    return [
        JobReport(dict.fromkeys(range(len(job.twin.vectors)), text), error="")
        for job, text in zip(jobs, texts, strict=True)
    ]


def twin_of(number: int, recorded: Sequence[str], mutated: Sequence[str]) -> Twin:
    calls = [
        Vector(f"{number}/{index}".encode(), answer) for index, answer in enumerate([*recorded, *mutated])
    ]
    split = len(recorded)
    return Twin(f"pin{number}", "a.py", f"f{number}", tuple(calls[:split]), tuple(calls[split:]), "p")


@given(TWINS)
def test_verdicts_of_constants_and_of_the_table(drawn: list[tuple[list[str], list[str]]]) -> None:
    twins = [twin_of(number, *answers) for number, answers in enumerate(drawn)]
    for scores, (recorded, mutated) in zip(play_stubs(twins, answers), drawn, strict=True):
        enough = math.ceil(0.95 * len(mutated))
        assert scores.passed_by == tuple(
            text for text in STUB_EXPRESSIONS if set(recorded) == {text} and mutated.count(text) >= enough
        )
        assert scores.is_passed_by_table is (mutated.count("None") >= enough)
        assert scores.report.error == ""


def test_a_call_that_cannot_be_made_again_agrees_with_no_constant() -> None:
    twins = [twin_of(0, ["None"] * 2, ["None"] * 12)]
    texts = " ".join(STUB_EXPRESSIONS)
    for bad in ("", "None"):
        report = JobReport({**dict.fromkeys(range(14), texts), 1: bad}, error="")
        (scores,) = play_stubs(twins, lambda _jobs, report=report: [report])
        assert (scores.passed_by, scores.is_passed_by_table) == ((), True)


def test_a_run_that_broke_leaves_no_verdict() -> None:
    twins = [twin_of(0, ["1"] * 6, ["1"] * 12)]
    (scores,) = play_stubs(twins, lambda _jobs: [JobReport(error="it broke", is_unknown=True)])
    assert (scores.report.error, scores.report.is_unknown) == ("it broke", True)
    assert (scores.passed_by, scores.is_passed_by_table) == ((), False)
    assert play_stubs([], answers) == []
