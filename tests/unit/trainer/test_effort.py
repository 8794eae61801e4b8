"""What effort costs: counts by kind, and the group's comparison in a real step."""

from __future__ import annotations

from typing import Any

import pytest

from composer_replication.errors import UsageError
from composer_replication.trainer.preset_settings import effort_units


def test_units_of_a_rollout_by_hand() -> None:
    counts = {
        "tool_call_token": 12.0,
        "tool_output_token": 18.0,
        "final_token": 3.0,
        "tool_call": 2.0,
        "turn": 3.0,
    }
    assert effort_units(counts) == pytest.approx(12 + 1.8 + 3 + 40 + 60)


@pytest.mark.parametrize("counts", [{"thoughts": 3}, {"turn": -1}, {"turn": float("nan")}])
def test_counts_that_are_none(counts: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="CR0777"):
        effort_units(counts)
