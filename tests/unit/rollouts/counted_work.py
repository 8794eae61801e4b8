"""How much work is a call? Counted, not timed: calls of functions, and the characters that patterns and slices pass over."""

from __future__ import annotations

import sys
from collections.abc import Callable


def num_calls(work: Callable[[], object]) -> int:
    """Calls of Python and C functions while ``work`` runs."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def growth(count: Callable[[int], int], size: int) -> float:
    """How often the work of ``size`` goes into the work of twice as much: 2 for linear work, 4 for a square."""
    return count(2 * size) / count(size)
