"""How many candidates a build will judge: hand-computed, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.tasks.expected_work import expected_decisions


@pytest.mark.parametrize(
    ("decided", "valid", "candidates", "max_tasks", "expected"),
    [
        (0, 0, 4000, 500, 4000),  # nothing is known yet
        (7, 0, 4000, 500, 4000),
        (7, 3, 4000, None, 4000),  # all are wanted
        (50, 25, 4000, 500, 1000),  # one in two is a task
        (50, 25, 600, 500, 600),
        (10, 3, 4000, 4, 14),  # 13.3, rounded up
        (30, 10, 4000, 10, 30),  # done
        (33, 12, 4000, 10, 33),  # several at a time: some more were judged
        (5, 5, 5, 9, 5),
    ],
)
def test_by_hand(decided: int, valid: int, candidates: int, max_tasks: int | None, expected: int) -> None:
    assert expected_decisions(decided, valid, candidates, max_tasks) == expected


@given(st.data())
def test_bounds(data: st.DataObject) -> None:
    candidates = data.draw(st.integers(0, 5000))
    decided = data.draw(st.integers(0, candidates))
    valid = data.draw(st.integers(0, decided))
    max_tasks = data.draw(st.none() | st.integers(1, 6000))
    expected = expected_decisions(decided, valid, candidates, max_tasks)
    assert decided <= expected <= candidates
    if max_tasks is not None and 0 < valid < max_tasks and expected < candidates:
        assert (
            abs(expected * valid / decided - max_tasks) < valid / decided + 1e-6
        )  # as many tasks as are asked for
