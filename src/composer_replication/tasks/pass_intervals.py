"""How far a pass rate may be from the truth."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054


def wilson(num_passed: int, num_samples: int) -> tuple[float, float]:
    """Wilson score interval at 95% for a proportion.

    centre = (p + z^2/2n) / (1 + z^2/n), half = z sqrt(p(1-p)/n + z^2/4n^2) / (1 + z^2/n).
    Samples of a fixed list of tasks vary less than this pooled interval says, so it
    covers at least 95% over fresh samples; it says nothing about other tasks.
    Reference: Wilson, Probable inference, 1927.
    """
    n, p, z = num_samples, num_passed / num_samples, Z_95
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    # The ends are exactly 0 and 1 there; floating point misses them by one bit.
    low = 0.0 if num_passed == 0 else centre - half
    high = 1.0 if num_passed == num_samples else centre + half
    return low, high
