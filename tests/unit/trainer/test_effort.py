"""What effort costs: counts by kind, and the group's comparison in a real step."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.errors import UsageError
from composer_replication.records import Completion, Rollout, StopReason, Turn
from composer_replication.trainer.effort_counts import counts_of_rollout, effort_units
from composer_replication.trainer.policy_options import EFFORT_KINDS, EffortPrice


def turn(num_prompt: int, num_answer: int) -> Turn:
    return Turn(tuple(range(num_prompt)), Completion(tuple(range(num_answer)), "", StopReason.FINISHED))


def test_counts_of_a_rollout_by_hand() -> None:
    """Prompts of 10, 25 and 40 ids; answers of 5, 7 and 3: tools gave 10 and 8."""
    turns = (turn(10, 5), turn(25, 7), turn(40, 3))
    counts = counts_of_rollout(Rollout("t", 1, turns, 1.0, None, StopReason.FINISHED, 0.0))
    assert counts == {
        "tool_call_token": 12.0,
        "tool_output_token": 18.0,
        "final_token": 3.0,
        "tool_call": 2.0,
        "turn": 3.0,
    }
    assert effort_units(counts, EffortPrice().unit_weights) == pytest.approx(12 + 1.8 + 3 + 40 + 60)
    empty = counts_of_rollout(Rollout("t", 1, (), None, None, StopReason.INFRASTRUCTURE, 0.0))
    assert set(empty.values()) == {0.0}
    assert set(counts) <= set(EFFORT_KINDS)


@pytest.mark.parametrize("counts", [{"thoughts": 3}, {"turn": -1}, {"turn": float("nan")}])
def test_counts_that_are_none(counts: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        effort_units(counts, EffortPrice().unit_weights)
    assert caught.value.code == "CR0764"
