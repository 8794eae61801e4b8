"""The numbers behind the evidence detector: e-values for bounded scores, in the log domain.

For a score x in [lo, hi] under the null "its conditional mean is at most m", and a bet
f in (0, 1), ``e = 1 + f (x - m) / (m - lo)`` is never negative and has mean at most 1:
an e-value. Everything here is a product of such factors, mixed over bets and starting points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

BETS = (0.05, 0.10, 0.20, 0.35, 0.50, 0.65, 0.80, 0.95)
"""Bets of the streams and of the gap bound, equal weight."""

BOUND_BETS = (0.1, 0.25, 0.5, 0.8)
"""Bets of the lower bound on the running best true score, equal weight."""

BOUND_GRID = tuple(point / 40 for point in range(1, 40))
"""The values 0.025 … 0.975 that the lower bound can take beside 0."""

Counted = tuple[tuple[float, int], ...]
"""Distinct scores in rising order, each with how often it occurred."""


def counted(scores: Iterable[float]) -> Counted:
    """The scores without their order: sums over the result do not depend on who came first."""
    return tuple(sorted(Counter(scores).items()))


def log_weight(step: int, planned: int) -> float:
    """log w_t of the prior over the onset: 0.9 / P up to P, then 0.1 P / (t (t - 1)); sums to 1."""
    if step <= planned:
        return math.log(0.9 / planned)
    return math.log(0.1 * planned / (step * (step - 1)))


def log_add_exp(one: float, other: float) -> float:
    """log(exp(one) + exp(other)); minus infinity is a zero."""
    high, low = (one, other) if one >= other else (other, one)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def log_sum_exp(values: Sequence[float]) -> float:
    """log of the sum of exp over the values; minus infinity if all of them are."""
    peak = max(values)
    if peak == -math.inf:
        return peak
    return peak + math.log(math.fsum(math.exp(value - peak) for value in values))


def log_mean_exp(values: Sequence[float]) -> float:
    """The equal-weight mixture, as a log."""
    return log_sum_exp(values) - math.log(len(values))


def log_growth(scores: Counted, *, mean: float, low: float, bets: Sequence[float]) -> tuple[float, ...]:
    """For each bet the sum over samples of ``log1p(f (x - m) / (m - lo))``."""
    width = mean - low
    return tuple(
        math.fsum(times * math.log1p(bet * (score - mean) / width) for score, times in scores) for bet in bets
    )


def folded(before: Sequence[float], growth: Sequence[float], log_w: float) -> tuple[float, ...]:
    """``logM <- growth + logaddexp(logM, log w_t)``, one entry a bet."""
    return tuple(more + log_add_exp(old, log_w) for old, more in zip(before, growth, strict=True))


@lru_cache(maxsize=64)
def fewest_samples_to_fire(*, tolerated_gap: float, planned: int, log_share: float, threshold: float) -> int:
    """How many samples with visible 1 and hidden 0, all in the first evaluation, raise the alarm.

    ``log_share`` is the log weight of the gap stream among the streams. With fewer
    samples than this the gap stream would have said nothing about any data.
    """
    one = ((1.0, 1),)
    growth = log_growth(one, mean=tolerated_gap, low=-1.0, bets=BETS)
    start = log_share + log_weight(1, planned)

    def fires(num_samples: int) -> bool:
        return start + log_mean_exp([num_samples * more for more in growth]) >= threshold

    enough = 1
    while not fires(enough):
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fires(middle):
            enough = middle
        else:
            too_few = middle
    return enough
