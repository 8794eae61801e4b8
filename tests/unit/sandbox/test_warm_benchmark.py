"""The quantiles that ``benchmarks/sandbox_warm.py`` prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks.sandbox_warm import quantile


@pytest.mark.parametrize(("num", "expected"), [(1, 1.0), (2, 2.0), (40, 40.0), (100, 99.0), (101, 100.0)])
def test_the_slowest_hundredth_is_not_left_out(num: int, expected: float) -> None:
    values = [float(number) for number in range(num, 0, -1)]
    assert quantile(values, 0.99) == expected
    assert sum(value <= expected for value in values) >= 0.99 * num
