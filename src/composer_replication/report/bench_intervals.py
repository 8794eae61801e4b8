"""Exact binomial intervals, with the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Callable

_BISECTIONS = 60
_NEGLIGIBLE = 1e-18


def clopper_pearson(num_hits: int, num_trials: int, level: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval of a share: both tails have (1 - level) / 2.

    The lower end solves P(X >= hits | p) = tail, the upper end P(X <= hits | p) = tail, with X
    binomial; without a hit the lower end is 0, with nothing but hits the upper end is 1.

    Reference: Clopper, Pearson, The use of confidence or fiducial limits, 1934.

    Raises:
        ValueError: no trial, hits outside 0 … trials, or a level outside (0, 1).
    """
    if num_trials < 1 or not 0 <= num_hits <= num_trials:
        raise ValueError(f"hits must be in 0 … trials and trials at least 1, got {num_hits} of {num_trials}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level!r}")
    tail = (1.0 - level) / 2.0
    share = num_hits / num_trials
    low, high = 0.0, 1.0
    if num_hits > 0:
        low = _root(lambda p: tail_probability(num_hits, num_trials, p, step=1) - tail, 0.0, share)
    if num_hits < num_trials:
        high = _root(lambda p: tail - tail_probability(num_hits, num_trials, p, step=-1), share, 1.0)
    return low, high


def tail_probability(num_hits: int, num_trials: int, p: float, *, step: int) -> float:
    """P(X >= hits) for ``step`` 1, P(X <= hits) for -1; X is binomial.

    Terms are summed away from ``num_hits`` until they no longer matter, each from the one
    before it. That is exact where the terms fall, which is on the far side of the mean.
    """
    if p in (0.0, 1.0):
        certain = 0 if p == 0.0 else num_trials
        return 1.0 if (certain - num_hits) * step >= 0 else 0.0
    log_choose = (
        math.lgamma(num_trials + 1) - math.lgamma(num_hits + 1) - math.lgamma(num_trials - num_hits + 1)
    )
    term = math.exp(log_choose + num_hits * math.log(p) + (num_trials - num_hits) * math.log1p(-p))
    odds = p / (1.0 - p)
    total, hits, mean = 0.0, num_hits, num_trials * p
    while 0 <= hits <= num_trials:
        total += term
        if term < _NEGLIGIBLE * total and (hits - mean) * step > 0:
            break
        ratio = (num_trials - hits) / (hits + 1) * odds if step > 0 else hits / (num_trials - hits + 1) / odds
        term *= ratio
        hits += step
    return min(1.0, total)


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function crosses zero, by bisection."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        if rising(middle) < 0.0:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
