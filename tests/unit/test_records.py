from __future__ import annotations

import dataclasses
import inspect

import pytest

from composer_replication import records
from composer_replication.records import Hole, Outcome, Score, Task, TestSplit

RECORDS = [kind for _, kind in inspect.getmembers(records, dataclasses.is_dataclass)]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: str(kind.__name__))
def test_every_record_is_frozen_and_small(kind: type) -> None:
    assert len(RECORDS) >= 14
    parameters = kind.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    assert "__slots__" in vars(kind)
    assert kind.__doc__


def task(
    visible: tuple[str, ...] = (),
    hidden: tuple[str, ...] = (),
    holes: tuple[Hole, ...] = (Hole("a.py", 0, 1),),
) -> Task:
    return Task(
        "id", "six==1", "f", "function", "body", "a.py", holes, TestSplit(visible, hidden, ()), "env", 3
    )


def test_fail_to_pass_is_both_sides_in_order() -> None:
    assert task(("b", "c"), ("a",)).fail_to_pass == ("a", "b", "c")
    assert task(("b",), ("a",)).has_hidden_tests
    assert not task(("b",)).has_hidden_tests


def test_only_a_function_body_is_one_hole() -> None:
    assert task().hole == Hole("a.py", 0, 1)
    two = task(holes=(Hole("a.py", 0, 1), Hole("b.py", 0, 1)))
    for other in (
        two,
        dataclasses.replace(task(), removal="whole"),
        dataclasses.replace(task(), granularity="class"),
    ):
        assert not other.is_one_hole
        with pytest.raises(ValueError, match="id has no single hole"):
            _ = other.hole


def score(*outcomes: Outcome, error: str = "") -> Score:
    return Score({f"t{n}": outcome for n, outcome in enumerate(outcomes)}, error)


def test_only_passed_counts_as_passed() -> None:
    mixed = score(*Outcome)
    assert mixed.num_passed == 1
    assert mixed.pass_share == 1 / len(Outcome)
    assert not mixed.all_passed
    assert (score().all_passed, score().pass_share) == (False, 0.0)  # nothing ran


def test_an_error_outweighs_passed_tests() -> None:
    broken = score(Outcome.PASSED, error="time-out")
    assert broken.num_passed == 1
    assert not broken.all_passed
    assert broken.pass_share == 0.0
