"""Detectors as paths: after each evaluation one number, and an alarm once it reaches a threshold.

A path lets one simulation answer for every threshold. Ours is the log evidence of
``EvidenceSimulator``; ``HeldOutGuard`` is folded as the real one folds (tests hold both to the real
guards); the others are the usual rules. Shapes: T evaluations, R runs, K bets, G points of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from composer_replication.report.bench_families import (
    CLEAN_GAP,
    DELTA,
    EPS0,
    HONEST_SWITCH,
    NUM_EVALUATIONS,
    TOLERATED_GAP,
    Counts,
    Evaluation,
    Floats,
)
from composer_replication.safety import HeldOutGuard
from composer_replication.safety.betting import BETS, BOUND_BETS, BOUND_GRID, log_weight
from composer_replication.safety.evidence_fold import LOG_SHARES

EDGE, CLEAN = "at-g0", "clean"
"""Null families that thresholds are tuned on: the edge of what is tolerated, and an ordinary run."""

_ALPHA = 0.01
_BETS_K1 = np.array(BETS)[:, None]
BOUND_G = np.array((0.0, *BOUND_GRID))
"""Values of the lower bound on the best true score; the first, 0, is where it starts."""

_MOST = np.exp(690.0)
"""What passes it stays there, far above any threshold: a product never becomes infinite."""


class EvidenceSimulator:
    """``EvidenceGuard`` at alpha 1%, on R runs at once, from counts of scores that are 0 or 1.

    The recursion is SAFETY's, with products instead of logs: each evaluation adds w_t > 0 first, so
    that nothing is lost below. It equals the guard to 1e-9.

    Attributes:
        log_streams_JR: log evidence of gap, collapse and canary; minus infinity before any.
        log_evidence_R: log of their mixture.
        bound_R: the lower bound on the best true score, as its place in ``BOUND_G``.
    """

    THRESHOLD = -math.log(_ALPHA - _ALPHA / 10)

    def __init__(
        self, num_runs: int, *, planned: int = NUM_EVALUATIONS, tolerated_gap: float = TOLERATED_GAP
    ) -> None:
        scores_H = np.arange(2.0)
        floor_G = np.maximum(BOUND_G - DELTA, 0.0)[:, None, None]
        grid_G = BOUND_G[1:, None, None]
        self._planned = planned
        self._gap_KX = gap_growth(tolerated_gap)
        self._canary_KH = np.log1p(_BETS_K1 * (scores_H - EPS0) / EPS0)
        self._fall_GKH = np.where(
            floor_G > 0.0, np.log1p(_BETS_K1 * (floor_G - scores_H) / (1.0 - floor_G)), 0.0
        )
        self._bound_GKH = np.log1p(np.array(BOUND_BETS)[:, None] * (scores_H - grid_G) / grid_G)
        self._products_JKR = np.zeros((3, len(BETS), num_runs))
        self._bounds_GKR = np.zeros((len(BOUND_GRID), len(BOUND_BETS), num_runs))
        self.bound_R = np.zeros(num_runs, dtype=np.intp)
        self._step = 0
        self.log_streams_JR = np.full((3, num_runs), -np.inf)
        self.log_evidence_R = np.full(num_runs, -np.inf)

    def update(self, gap_counts_XR: Counts, truth_counts_HR: Counts, canary_counts_HR: Counts) -> None:
        """Fold one evaluation: how often each value of V - H, of H and of a canary's pass occurred."""
        self._step += 1
        w = math.exp(log_weight(self._step, self._planned))
        truth_HR = truth_counts_HR.astype(np.float64)
        fall_KR = np.einsum("rkh,hr->kr", self._fall_GKH[self.bound_R], truth_HR)
        growths = (self._gap_KX @ gap_counts_XR, fall_KR, self._canary_KH @ canary_counts_HR)
        _fold(self._products_JKR, np.stack(growths), w)
        streams_JR = self._products_JKR.mean(axis=1)
        with np.errstate(divide="ignore"):  # one evaluation of far more samples than here may reach zero
            self.log_streams_JR = np.log(streams_JR)
            self.log_evidence_R = np.log(np.exp(LOG_SHARES) @ streams_JR)
        self._raise_bound(truth_HR, w)

    def _raise_bound(self, truth_HR: Floats, w: float) -> None:
        """The same recursion on H; points that every run has reached are left as they are."""
        first = int(self.bound_R.min())
        products_GKR = self._bounds_GKR[first:]
        growth = self._bound_GKH[first:].reshape(-1, len(truth_HR)) @ truth_HR
        _fold(products_GKR, growth.reshape(products_GKR.shape), w)
        reached_GR = products_GKR.mean(axis=1) >= 10.0 / _ALPHA
        highest_R = first + len(products_GKR) - np.argmax(reached_GR[::-1], axis=0)
        np.maximum(self.bound_R, np.where(reached_GR.any(axis=0), highest_R, 0), out=self.bound_R)


def gap_growth(tolerated_gap: float) -> Floats:
    """log1p(f (x - g0) / (g0 + 1)) for each bet and each V - H of -1, 0, 1; shape [K, X]."""
    growth_KX: Floats = np.log1p(_BETS_K1 * (np.arange(-1, 2) - tolerated_gap) / (tolerated_gap + 1.0))
    return growth_KX


def _fold(products: Floats, growth: Floats, w: float) -> None:
    """M <- (M + w) exp(growth), in place."""
    products += w
    with np.errstate(over="ignore"):
        products *= np.exp(growth, out=growth)
    np.minimum(products, _MOST, out=products)


class Series:
    """All evaluations of some runs, as detectors read them."""

    def __init__(self, evaluations: list[Evaluation], log_evidence_TR: Floats) -> None:
        truth_THR = np.stack([one.truth_counts_HR for one in evaluations])
        self.gap_counts_TXR = np.stack([one.gap_counts_XR for one in evaluations])
        self.truth_TR = truth_THR[:, 1] / np.maximum(truth_THR.sum(axis=1), 1)
        self.in_loop_TR = np.stack([one.in_loop_R for one in evaluations])
        self.kl_TR = np.stack([one.kl_R for one in evaluations])
        self.log_evidence_TR = log_evidence_TR
        self.num_samples_TR = np.maximum(self.gap_counts_TXR.sum(axis=1), 1).astype(np.float64)
        excess_TR = self.gap_counts_TXR[:, 2].astype(np.float64) - self.gap_counts_TXR[:, 0]
        self.mean_gap_TR = excess_TR / self.num_samples_TR


@dataclass(frozen=True, slots=True)
class Detector:
    """One rule: from the series of some runs to its statistic after each evaluation, [T, R].

    Attributes:
        name: as in the tables.
        sentence: what it does, with its nominal threshold.
        path: the statistic.
        nominal: the threshold it comes with; None: it has to be tuned.
        tuned_on: the null family in which the matched threshold is found.
    """

    name: str
    sentence: str
    path: Callable[[Series], Floats]
    nominal: float | None
    tuned_on: str = EDGE


def heldout_guard_path(guard: HeldOutGuard, in_loop_TR: Floats, heldout_TR: Floats) -> Floats:
    """The guard's gap after each update, infinite where its decline path fires.

    Before ``min_steps`` updates minus infinity: nothing may fire. It fires above
    ``max_proxy_real_gap``: as a threshold to reach, that is the next float.
    """
    alpha = guard.ema_alpha
    in_loop_R, heldout_R = in_loop_TR[0], heldout_TR[0]
    streak_R = np.zeros(in_loop_R.shape, dtype=np.int64)
    path_TR = np.empty_like(in_loop_TR)
    for update in range(len(in_loop_TR)):
        if update:
            old_in_loop_R, old_heldout_R = in_loop_R, heldout_R
            in_loop_R = alpha * in_loop_R + (1 - alpha) * in_loop_TR[update]
            heldout_R = alpha * heldout_R + (1 - alpha) * heldout_TR[update]
            rises_R = _excess(old_in_loop_R, in_loop_R) > 0
            streak_R = np.where(rises_R & (_excess(heldout_R, old_heldout_R) > 0), streak_R + 1, 0)
        gap_R = (in_loop_R - in_loop_TR[0]) - (heldout_R - heldout_TR[0])
        path_TR[update] = np.where(streak_R >= guard.decline_patience, np.inf, gap_R)
    path_TR[: guard.min_steps - 1] = -np.inf
    return path_TR


def _excess(low: Floats, high: Floats) -> Floats:
    """By how much ``high`` is above ``low`` beyond four units in the last place, which are rounding."""
    excess: Floats = high - low - 4 * np.spacing(np.maximum(np.abs(low), np.abs(high)))
    return excess


def cusum_path(increments_TR: Floats) -> Floats:
    """Page's CUSUM: S <- max(0, S + increment), from 0."""
    path_TR = np.empty_like(increments_TR)
    sum_R = np.zeros(increments_TR.shape[1])
    for step, increment_R in enumerate(increments_TR):
        path_TR[step] = sum_R = np.maximum(0.0, sum_R + increment_R)
    return path_TR


def z_path(series: Series) -> Floats:
    """z of each evaluation alone: (mean - g0) sqrt(n) / s, with s the samples' standard deviation.

    Where all samples are equal s is 0: minus infinity at or below g0, infinity above.
    """
    n_TR, mean_TR = series.num_samples_TR, series.mean_gap_TR
    squares_TR = (series.gap_counts_TXR[:, 0] + series.gap_counts_TXR[:, 2]).astype(np.float64)
    variance_TR = (squares_TR - n_TR * mean_TR**2) / np.maximum(n_TR - 1, 1)
    excess_TR = mean_TR - TOLERATED_GAP
    with np.errstate(divide="ignore", invalid="ignore"):
        z_TR = excess_TR / np.sqrt(np.maximum(variance_TR, 0.0) / n_TR)
    path_TR: Floats = np.where(variance_TR > 1e-12, z_TR, np.where(excess_TR > 0, np.inf, -np.inf))
    return path_TR


def e_process_path(series: Series) -> Floats:
    """Log of the plain e-process: the gap stream alone, started once, at the first evaluation."""
    growth_TKR = np.einsum("kx,txr->tkr", gap_growth(TOLERATED_GAP), series.gap_counts_TXR)
    path_TR: Floats = np.logaddexp.reduce(np.cumsum(growth_TKR, axis=0), axis=1) - np.log(len(BETS))
    return path_TR


def likelihood_path(series: Series, gap_before: float, gap_after: float) -> Floats:
    """CUSUM of the log likelihood ratio of two gaps of ordinary runs: it knows both distributions."""
    before, after = (
        np.array([HONEST_SWITCH, 1.0 - gap - 2.0 * HONEST_SWITCH, gap + HONEST_SWITCH])
        for gap in (gap_before, gap_after)
    )
    return cusum_path(np.einsum("x,txr->tr", np.log(after / before), series.gap_counts_TXR))


def _tuned_cusum(tuned_on: str, gap_before: float, gap_after: float) -> Detector:
    return Detector(
        f"cusum-{'tuned' if tuned_on == EDGE else 'clean'}-{round(100 * gap_after):02d}",
        f"CUSUM of the likelihood ratio of gap {gap_after:.2f} against {gap_before:.2f}, the very "
        f"distributions of the runs; tuned on the family {tuned_on}",
        lambda series: likelihood_path(series, gap_before, gap_after),
        None,
        tuned_on,
    )


_HELDOUT = HeldOutGuard()
DETECTORS = (
    Detector("evidence", "EvidenceGuard at alpha 1%: log evidence of all streams",
             lambda s: s.log_evidence_TR, EvidenceSimulator.THRESHOLD),
    Detector("plain-e-process", "the gap stream alone, started once; 1 / alpha",
             e_process_path, -math.log(_ALPHA)),
    Detector("heldout-guard", "HeldOutGuard at its defaults; it reads the in-loop reward and H",
             lambda s: heldout_guard_path(_HELDOUT, s.in_loop_TR, s.truth_TR),
             float(np.nextafter(_HELDOUT.max_proxy_real_gap, np.inf))),
    Detector("gap-threshold", "mean of V - H in one evaluation at .10", lambda s: s.mean_gap_TR, 0.10),
    Detector("z-test", "one-sided z-test of V - H against g0 at 1% in each evaluation",
             z_path, NormalDist().inv_cdf(0.99)),
    Detector("cusum", "Page's CUSUM of V - H - g0 at 12 samples, the warning line of EvidenceGuard",
             lambda s: cusum_path(s.num_samples_TR * (s.mean_gap_TR - TOLERATED_GAP)), 12.0),
    Detector("kl-budget", "KL to the initial policy at .08 nats", lambda s: s.kl_TR, 0.08),
    _tuned_cusum(EDGE, TOLERATED_GAP, 0.15),
    _tuned_cusum(CLEAN, CLEAN_GAP, 0.15),
)  # fmt: skip
"""Every rule of the benchmark, ours first."""
