"""Twins hold no call that hangs or dies, and lose nothing else for it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.planning.body_cuts import find_body_cuts
from composer_replication.tasks.running.bench import Bench
from composer_replication.tasks.twin.twin_run import Twin, build_twins, judge_twin

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# 8 never returns and no signal is heard while it runs, 5 takes the process down, 1 asks for more memory than
# there is; the tests use 2 and 4, so that 1, 5 and 8 come of 2 - 1, 4 + 1 and 2 * 4.
SOURCE = """
import collections
import ctypes
import itertools

def parts(number, items):
    if number == 8:
        collections.deque(itertools.repeat(0), maxlen=0)
    if number == 5:
        ctypes.string_at(0)
    if number == 1:
        return [0] * 10**12
    return [items[start : start + number] for start in range(0, len(items), max(1, number))]

def doubled(number):
    other = number
    total = other + number
    return total

def hashed(text):
    first = text[:1]
    last = text[-1:]
    return (first, last, hash(text) % 2)
"""
TESTS = """
from fields import doubled, hashed, parts

def test_parts():
    assert parts(2, [1, 2, 3]) == [[1, 2], [3]]
    assert parts(4, [5, 6, 7, 8, 9]) == [[5, 6, 7, 8], [9]]

def test_doubled():
    assert doubled(1) == 2 and doubled(4) == 8 and doubled(10) == 20

def test_hashed():
    assert hashed("abc")[:2] == ("a", "c") and hashed("xyz")[0] == "x"
"""
FILES = {"fields.py": SOURCE.encode(), "test_fields.py": TESTS.encode(), "pyproject.toml": b""}
CUTS = {cut.symbol: cut for cut in find_body_cuts("fields.py", SOURCE)}


@pytest.fixture(scope="module")
def built(environment: Environment) -> tuple[Mapping[str, Twin], dict[str, str]]:
    cuts = list(CUTS.values())
    found = build_twins(Bench(FILES, environment, None, 60, 60), cuts, eager={cut.pin for cut in cuts})
    return {twin.symbol: twin for twin in found.twins.values()}, found.without


def arguments(twin: Twin) -> list[tuple[Any, ...]]:
    """What its calls were made with; plain values, which need no cloudpickle."""
    return [pickle.loads(vector.blob)[0] for vector in twin.vectors]


def test_a_call_that_hangs_or_dies_costs_itself(built, environment: Environment) -> None:
    twins, notes = built
    assert {"parts", "doubled"} <= set(twins), notes
    numbers = {number for number, *_ in arguments(twins["parts"])}
    assert numbers.isdisjoint({1, 5, 8})
    assert {2, 4} <= numbers
    assert len(twins["parts"].recorded) == 2
    assert len(twins["parts"].mutated) >= 30
    assert judge_twin(FILES, environment, twins["parts"], timeout_seconds=60).passed


def test_a_candidate_that_dies_in_one_call_fails_that_call_alone(built, environment: Environment) -> None:
    twins, _ = built
    twin = twins["doubled"]
    odd = arguments(twin)[-1][0]
    body = f"import os\n    if number == {odd!r} and type(number) is {type(odd).__name__}:\n        os._exit(0)\n    return 2 * number\n"
    cut = CUTS["doubled"]
    tree = {**FILES, "fields.py": (SOURCE[: cut.start] + "\n    " + body + SOURCE[cut.end :]).encode()}
    score = judge_twin(tree, environment, twin, timeout_seconds=60)
    assert score.error == ""
    assert score.recorded_agree + score.mutated_agree == score.num_recorded + score.num_mutated - 1
