"""What the load benchmark of the environment server takes for a failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import openenv_load

PLANTED = {"step": 1000, "died": 9, "killed": 2, "full": 5, "graded": 3}


@pytest.mark.parametrize(
    ("more", "num_left", "returncode", "has_failed"),
    [
        ({}, 0, 0, False),
        ({"lost": 1}, 0, 0, True),  # submitted, and no reward came
        ({"lost CR0303 the sandbox broke": 2}, 0, 0, True),
        ({}, 1, 0, True),
        ({}, 0, 1, True),
    ],
)
def test_an_attempt_that_is_lost_under_a_living_client_is_a_failure(
    more: dict[str, int], num_left: int, returncode: int, *, has_failed: bool
) -> None:
    found = openenv_load.has_failed({**PLANTED, **more}, num_left=num_left, returncode=returncode)
    assert found is has_failed
