"""A table passes the visible tests that it was made from, and fails the twin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.tasks.intake.environment import Environment, open_environment
from composer_replication.tasks.intake.lock import resolve
from composer_replication.tasks.lookup_gate import answered_calls, with_tables
from composer_replication.tasks.planning.body_cuts import STUB_EXPRESSIONS, find_body_cuts
from composer_replication.tasks.running.bench import Bench, run_alone
from composer_replication.tasks.test_run import TestReport, Trial
from composer_replication.tasks.twin.build_twins import build_twins
from composer_replication.tasks.twin.twin_judge import judge_twin, play_stubs
from composer_replication.tasks.twin.twin_records import Twin, Vector
from composer_replication.tasks.twin.twin_run import Job, JobReport, RecordedCall

pytestmark = pytest.mark.timeout(600)  # the first test of all builds the twins for the rest

PATH = "lib/trade.py"
SOURCE = '''
class Till:
    def __init__(self, coins):
        self.coins = coins

    def give(self, amount, *, most=10):
        """The coins for an amount, largest first, one at a time."""
        for coin in sorted(self.coins, reverse=True):
            while amount >= coin and most:
                amount -= coin
                most -= 1
                yield coin

def share(total, *people, rest="last"):
    """Who gets how much."""
    if not people:
        raise ValueError("nobody")
    each, left = divmod(total, len(people))
    found = {name: each for name in people}
    found[people[-1 if rest == "last" else 0]] += left
    return found
'''
TESTS = """
import pytest
from trade import Till, share

def test_give():
    assert list(Till([1, 5, 10]).give(18)) == [10, 5, 1, 1, 1]
    assert list(Till([2]).give(9, most=2)) == [2, 2]

def test_give_nothing():
    assert list(Till([5, 1]).give(0)) == []

def test_share():
    assert share(7, "ann", "bob") == {"ann": 3, "bob": 4}
    assert share(7, "ann", "bob", rest="first") == {"ann": 4, "bob": 3}
    with pytest.raises(ValueError, match="nobody"):
        share(7)

def test_share_hidden():
    assert share(9, "eve", "joe") == {"eve": 4, "joe": 5}
"""
FILES = {PATH: SOURCE.encode(), "tests/test_trade.py": TESTS.encode()}
CUTS = {cut.symbol: cut for cut in find_body_cuts(PATH, SOURCE)}
VISIBLE = {
    "share": ["tests/test_trade.py::test_share"],
    "Till.give": ["tests/test_trade.py::test_give", "tests/test_trade.py::test_give_nothing"],
}
HIDDEN = ["tests/test_trade.py::test_share_hidden"]


@pytest.fixture(scope="module")
def runner() -> Environment:
    return open_environment(resolve([], "the tests"))


@pytest.fixture(scope="module")
def twins(runner: Environment) -> dict[str, Twin]:
    found = build_twins(Bench(FILES, runner, None, 60, 60), list(CUTS.values()))
    return {twin.symbol: twin for twin in found.twins.values()}


@pytest.fixture
def run(tmp_path: Path, runner: Environment):
    def run_files(files: dict[str, bytes], node_ids: list[str]) -> TestReport:
        return run_alone(Trial(files, node_ids, 60.0), runner)

    return run_files


def solved(symbol: str, runner: Environment, twin: Twin, visible: list[str]) -> dict[str, bytes]:
    """The tree with a table of what the visible tests ask."""
    cut = CUTS[symbol]
    calls = [
        RecordedCall(vector.blob, tests)
        for vector, tests in zip(twin.recorded, twin.tests, strict=True)
        if not set(visible).isdisjoint(tests)
    ]
    answers, problems = answered_calls(Bench(FILES, runner, None, 60, 60), [(cut, calls)])
    assert problems == {}
    table = [(call.blob, answer) for call, answer in zip(calls, answers[cut.pin], strict=True)]
    return with_tables(FILES, [cut], {cut.pin: table})


@pytest.mark.long
@pytest.mark.parametrize("symbol", ["Till.give", "share"])
def test_visible_tests_pass_and_the_twin_fails(run, runner: Environment, twins, symbol: str) -> None:
    files = solved(symbol, runner, twins[symbol], VISIBLE[symbol])
    assert set(files) == {*FILES, "lib/composer_lookup_table_0.py"}
    report = run(files, VISIBLE[symbol])
    assert (report.error, sorted(report.passed)) == ("", sorted(VISIBLE[symbol]))
    score = judge_twin(files, runner, twins[symbol], timeout_seconds=60)
    assert not score.passed
    assert score.mutated_agree <= 0.5 * score.num_mutated


def test_all_recorded_calls_agree_with_the_table_of_all(runner: Environment, twins) -> None:
    files = solved("share", runner, twins["share"], [*VISIBLE["share"], *HIDDEN])
    score = judge_twin(files, runner, twins["share"], timeout_seconds=60)
    assert (score.recorded_agree, score.num_recorded) == (4, 4)
    assert score.num_mutated - score.mutated_agree == twins["share"].num_lookup_misses


# --- which constants pass recorded behaviour, and what a table does ---


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
        JobReport(dict.fromkeys(range(len(job.function.blobs)), ("ret", text)), error="")
        for job, text in zip(jobs, texts, strict=True)
    ]


def twin_of(number: int, recorded: Sequence[str], mutated: Sequence[str]) -> Twin:
    calls = [
        Vector(f"{number}/{index}".encode(), answer) for index, answer in enumerate([*recorded, *mutated])
    ]
    split = len(recorded)
    return Twin(f"pin{number}", "a.py", f"f{number}", tuple(calls[:split]), tuple(calls[split:]),
                tuple(("t",) for _ in recorded), 0, "p")  # fmt: skip


@given(TWINS)
def test_verdicts_of_constants_and_of_the_table(drawn: list[tuple[list[str], list[str]]]) -> None:
    twins = [twin_of(number, *answers) for number, answers in enumerate(drawn)]
    for scores, (recorded, mutated) in zip(play_stubs(twins, answers), drawn, strict=True):
        enough = math.ceil(0.95 * len(mutated))
        assert scores.passed_by == tuple(
            text for text in STUB_EXPRESSIONS if set(recorded) == {text} and mutated.count(text) >= enough
        )
        lookup = scores.lookup
        assert (lookup.recorded_agree, lookup.num_recorded) == (len(recorded), len(recorded))
        assert (lookup.mutated_agree, lookup.num_mutated) == (mutated.count("None"), len(mutated))
        assert scores.report.error == ""


def test_a_run_that_broke_leaves_no_verdict() -> None:
    twins = [twin_of(0, ["1"] * 6, ["1"] * 12)]
    (scores,) = play_stubs(twins, lambda _jobs: [JobReport(error="it broke", is_unknown=True)])
    assert (scores.report.error, scores.report.is_unknown) == ("it broke", True)
    assert (scores.passed_by, scores.lookup.passed) == ((), False)
    assert play_stubs([], answers) == []
