"""Numbers of the command line: what is out of range is refused where the arguments are read (CR0206)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole_number(least: int = 1, most: int = 2**32 - 1) -> Callable[[str], int]:
    """A type for ``add_argument``: whole numbers in [least, most]."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in {least} … {most}")
        return value

    return convert


def number(least: float = 0.0, *, is_above: bool = False) -> Callable[[str], float]:
    """A type for ``add_argument``: finite numbers from ``least`` on, or above it."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (value > least if is_above else value >= least)):
            wanted = "a number above" if is_above else "a number of at least"
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted} {least:g}")
        return value

    return convert
