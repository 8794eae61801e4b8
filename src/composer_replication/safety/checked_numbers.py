"""Numbers from outside, checked one way: each refusal is a ValueError that names the argument."""

from __future__ import annotations

import math
import operator
import sys
from numbers import Real
from typing import SupportsIndex

_LARGEST = sys.float_info.max


def number(name: str, value: object, where: str = "") -> float:
    """A real number as a float; NaN and the infinities pass, a bool does not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}{where}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} must be finite and is too large for a float{where}") from error


def finite(name: str, value: object, where: str = "") -> float:
    """A finite real number as a float."""
    checked = number(name, value, where)
    if not math.isfinite(checked):
        raise ValueError(f"{name} must be finite, got {value!r}{where}")
    return checked


def positive(name: str, value: object) -> float:
    """A finite real number above 0 as a float."""
    checked = finite(name, value)
    if checked <= 0.0:
        raise ValueError(f"{name} must be > 0, got {value!r}")
    return checked


def integer(name: str, value: object) -> int:
    """A whole number of any integer type, but no bool and no float."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError as error:  # an array has the method and still is no whole number
        raise ValueError(f"{name} must be an integer, got {value!r}") from error


def positive_count(name: str, value: object) -> int:
    """A whole number of at least 1."""
    count = integer(name, value)
    if count < 1:
        raise ValueError(f"{name} must be >= 1, got {value!r}")
    return count


def clamped(value: float) -> float:
    """Keep a difference beyond the largest float from becoming infinite, then NaN."""
    return max(-_LARGEST, min(_LARGEST, value))


def direction(previous: float, current: float) -> int:
    """-1, 0 or 1: whether an average fell, stayed (up to rounding) or rose."""
    change = current - previous
    if abs(change) <= 4 * math.ulp(max(abs(previous), abs(current))):
        return 0
    return 1 if change > 0 else -1
