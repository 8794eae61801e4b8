"""The evidence detector on thousands of runs at once, for the guard's benchmark.

The same numbers as ``safety.EvidenceGuard``, to 1e-9 (tests compare both with golden series),
from counts instead of single scores: scores are multiples of 1/q, so that a sum over samples is
a sum over few values. Products are kept as they are, not as logs: each evaluation adds w_t > 0
first, so that nothing is lost below, and what passes e^690 stays there, far above any threshold.

Letters of a shape: R runs, K bets, G points of the grid, A error levels, X values of V - H
(-q … q, in steps of 1/q), H values of one score (0 … q).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.integer]

BETS = np.array([0.05, 0.10, 0.20, 0.35, 0.50, 0.65, 0.80, 0.95])
BOUND_BETS = np.array([0.1, 0.25, 0.5, 0.8])
BOUND_GRID = np.arange(40) / 40
"""Values of the lower bound; the first, 0, is where it starts."""

SHARES = (0.6, 0.1, 0.3)
"""Weights of the streams gap, collapse and canary."""

_MOST = np.exp(690.0)


def weight(step: int, planned: int) -> float:
    """w_t of the prior over the onset: 0.9 / P up to P, then 0.1 P / (t (t - 1))."""
    return 0.9 / planned if step <= planned else 0.1 * planned / (step * (step - 1))


def log_threshold(alpha: float) -> float:
    """The alarm stands at -log(alpha - alpha_1), alpha_1 = alpha / 10."""
    return float(-np.log(alpha - alpha / 10))


def gap_growth(tolerated_gap: float, num_levels: int) -> Floats:
    """log1p(f (x - g0) / (g0 + 1)) for each bet and each value of V - H, shape [K, X]."""
    values_X = np.arange(-num_levels, num_levels + 1) / num_levels
    return np.log1p(BETS[:, None] * (values_X - tolerated_gap) / (tolerated_gap + 1.0))


class EvidenceSimulator:
    """Three streams and the lower bound for R runs, as SAFETY's recursion has them.

    Args:
        num_runs: R.
        planned_evaluations: P of the prior.
        tolerated_gap: g0.
        alphas: error levels A; the collapse stream of each follows its own lower bound.
        delta: tolerated fall of the true score.
        eps0: tolerated pass rate of the canaries.
        num_levels: q; 1 for scores that are 0 or 1.

    Attributes:
        step: evaluations so far.
        log_streams_AJR: log evidence of gap, collapse and canary; minus infinity before any.
        log_evidence_AR: log of their mixture.
        lower_bound: [A, R], the bound on the best true score.
    """

    def __init__(
        self,
        num_runs: int,
        *,
        planned_evaluations: int,
        tolerated_gap: float,
        alphas: tuple[float, ...] = (0.01,),
        delta: float = 0.05,
        eps0: float = 0.005,
        num_levels: int = 1,
    ) -> None:
        scores_H = np.arange(num_levels + 1) / num_levels
        floor_G = BOUND_GRID - delta
        tests_fall_G = floor_G > 0.0
        safe_floor_G = np.where(tests_fall_G, floor_G, 0.0)[:, None, None]
        fall_GKH = np.log1p(BETS[:, None] * (safe_floor_G - scores_H) / (1.0 - safe_floor_G))
        grid_G = BOUND_GRID[1:, None, None]
        self._planned = planned_evaluations
        self._gap_KX = gap_growth(tolerated_gap, num_levels)
        self._canary_KH = np.log1p(BETS[:, None] * (scores_H - eps0) / eps0)
        self._fall_GKH = np.where(tests_fall_G[:, None, None], fall_GKH, 0.0)
        self._bound_GKH = np.log1p(BOUND_BETS[:, None] * (scores_H - grid_G) / grid_G)
        self._bound_thresholds = tuple(10.0 / alpha for alpha in alphas)
        self._products_gap_KR = np.zeros((len(BETS), num_runs))
        self._products_canary_KR = np.zeros((len(BETS), num_runs))
        self._products_fall_AKR = np.zeros((len(alphas), len(BETS), num_runs))
        self._products_bound_GKR = np.zeros((len(BOUND_GRID) - 1, len(BOUND_BETS), num_runs))
        self._bound_AR = np.zeros((len(alphas), num_runs), dtype=np.intp)
        self.step = 0
        self.log_streams_AJR = np.full((len(alphas), 3, num_runs), -np.inf)
        self.log_evidence_AR = np.full((len(alphas), num_runs), -np.inf)

    @property
    def lower_bound(self) -> Floats:
        """The bound at each error level."""
        bound_AR: Floats = BOUND_GRID[self._bound_AR]
        return bound_AR

    def update(self, gap_counts_XR: Counts, truth_counts_HR: Counts, canary_counts_HR: Counts) -> None:
        """Fold one evaluation: how often each value of V - H, of H and of a canary's pass occurred."""
        self.step += 1
        w = weight(self.step, self._planned)
        truth_HR = truth_counts_HR.astype(np.float64)
        _fold(self._products_gap_KR, self._gap_KX @ gap_counts_XR, w)
        _fold(self._products_canary_KR, self._canary_KH @ canary_counts_HR, w)
        for level, bound_R in enumerate(self._bound_AR):
            growth_KR = np.einsum("rkh,hr->kr", self._fall_GKH[bound_R], truth_HR)
            _fold(self._products_fall_AKR[level], growth_KR, w)
        self._mix()
        self._raise_bound(truth_HR, w)

    def _mix(self) -> None:
        gap_R = self._products_gap_KR.mean(axis=0)
        canary_R = self._products_canary_KR.mean(axis=0)
        with np.errstate(divide="ignore"):  # one evaluation of far more samples than here may reach zero
            for level, products_KR in enumerate(self._products_fall_AKR):
                fall_R = products_KR.mean(axis=0)
                streams_JR = np.stack([gap_R, fall_R, canary_R])
                self.log_streams_AJR[level] = np.log(streams_JR)
                self.log_evidence_AR[level] = np.log(SHARES @ streams_JR)

    def _raise_bound(self, truth_HR: Floats, w: float) -> None:
        """The same recursion on H; points that every run has reached are left as they are."""
        first = int(self._bound_AR.min())
        products_GKR = self._products_bound_GKR[first:]
        num_points, num_bets, num_runs = products_GKR.shape
        growth = self._bound_GKH[first:].reshape(-1, truth_HR.shape[0]) @ truth_HR
        _fold(products_GKR, growth.reshape(num_points, num_bets, num_runs), w)
        mixture_GR = products_GKR.mean(axis=1)
        for level, threshold in enumerate(self._bound_thresholds):
            reached_GR = mixture_GR >= threshold
            highest_R = num_points - np.argmax(reached_GR[::-1], axis=0)
            highest_R = np.where(reached_GR.any(axis=0), first + highest_R, 0)
            np.maximum(self._bound_AR[level], highest_R, out=self._bound_AR[level])


def _fold(products: Floats, growth: Floats, w: float) -> None:
    """M <- (M + w) exp(growth), in place."""
    products += w
    with np.errstate(over="ignore"):
        products *= np.exp(growth, out=growth)
    np.minimum(products, _MOST, out=products)
