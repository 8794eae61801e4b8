"""In a simulated run whose policy gets better, more groups have a signal than from tasks in data order."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from composer_replication.channel_tables import CurriculumSection

BENCHMARK = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "curriculum_signal.py"))


@pytest.mark.parametrize(("mean", "spread"), [(2.0, 4.0), (5.0, 3.0)], ids=["wide", "too-hard"])
def test_more_groups_have_a_signal(mean: float, spread: float) -> None:
    pool = BENCHMARK["Pool"](100, 8, 8, 120, mean, spread, 1)
    found: dict[str, Any] = BENCHMARK["shares"](pool, CurriculumSection())
    assert found["curriculum"] > found["uniform"] + 0.08
    assert found["recorded"] > found["uniform"] + 0.08
    assert found["curriculum"] < found["oracle"] < 1.0


def test_a_floor_of_all_gives_up_the_advantage() -> None:
    """The margin comes from the weights and from nothing else: without them it is gone."""
    pool = BENCHMARK["Pool"](100, 8, 8, 120, 2.0, 4.0, 1)
    options = type("Options", (CurriculumSection,), {"retire_certainty": 0.999999, "floor_share": 1.0})()
    found: dict[str, Any] = BENCHMARK["shares"](pool, options)
    assert abs(found["curriculum"] - found["uniform"]) < 0.05
