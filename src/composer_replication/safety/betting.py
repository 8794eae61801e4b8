"""The numbers behind the evidence detector: e-values for bounded scores, in the log domain, and a bound on a gap.

For a score x in [lo, hi] under the null "its conditional mean is at most m", and a bet
f in (0, 1), ``e = 1 + f (x - m) / (m - lo)`` is never negative and has mean at most 1:
an e-value. Everything here is a product of such factors, mixed over bets and starting points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from composer_replication.safety.checked_numbers import finite
from composer_replication.safety.evaluation_journal import checked_pair

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
    """log of the sum of exp over the values, of which one at least is finite."""
    peak = max(values)
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


def upper_confidence_gap(pairs: Iterable[Iterable[float]], level: float = 0.99) -> float:
    """Upper confidence bound on the mean of visible minus hidden, by betting.

    With x_i = V_i - H_i and the bets f_k of the detector it is the smallest m above the mean of x with
    ``logsumexp_k sum_i log1p(f_k (m - x_i) / (1 - m)) - log 8 >= -log(1 - level)``.
    Each factor is an e-value for "the mean is at least m", so for tasks drawn and scored
    independently P(bound < true mean) <= 1 - level, at any number of samples and also if it
    was looked at while they came in. For a true gap of .03 the 99% bound is about .08 from
    400 pairs and .052 from 2,000.

    For g0 take the largest bound of several honest policies of different ability, each of k
    at level 1 - (1 - level) / k, and .02 for those that were not measured.

    Args:
        pairs: (visible, hidden) of each task, in [0, 1]; several rollouts of a task averaged first.
        level: confidence, in (0, 1). A ValueError names what is out of range.

    Returns:
        A gap in (-1, 1]; 1.0 where the data refute nothing.

    Reference: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
    betting", 2020, arXiv 2010.09686. Departs from it in the fixed bets, mixed, where theirs adapt.
    """
    confidence = finite("level", level)
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"level must be in (0, 1), got {level!r}")
    gaps = [visible - hidden for visible, hidden in map(checked_pair, pairs)]
    if not gaps:
        raise ValueError("pairs must be non-empty")
    mirrored = counted(-gap for gap in gaps)
    needed = -math.log1p(-confidence)

    def is_refuted(mean: float) -> bool:
        return log_mean_exp(log_growth(mirrored, mean=-mean, low=-1.0, bets=BETS)) >= needed

    possible, refuted = math.fsum(gaps) / len(gaps), 1.0 - 1e-9
    if not is_refuted(refuted):
        return 1.0
    for _ in range(60):  # below the spacing of floats
        middle = (possible + refuted) / 2
        if is_refuted(middle):
            refuted = middle
        else:
            possible = middle
    return refuted
