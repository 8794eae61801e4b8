"""How far a pass rate may be from the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z_95 = 1.959963984540054


def mean_interval(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Wilson's interval at 95% for the mean pass rate of some tasks, each with (passed, samples).

    With n = tasks x the fewest samples of a task: the variance of the mean is the sum of p_i(1-p_i)/n_i over T^2,
    which is at most p(1-p)/n at the mean p, because p(1-p) is concave. It speaks of fresh samples on these tasks.
    """
    mean = sum(passed / samples for passed, samples in counts) / len(counts)
    fewest = len(counts) * min(samples for _, samples in counts)
    return wilson(mean * fewest, fewest)


def wilson(num_passed: float, num_samples: int) -> tuple[float, float]:
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
