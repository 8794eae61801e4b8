"""Detectors as paths: after each evaluation one number, and an alarm once it reaches a threshold.

A path lets one simulation answer for every threshold. Ours is the log evidence of
``EvidenceSimulator``; ``HeldOutGuard`` is folded as the real one folds (a test compares them);
the others are the usual rules that people put on such curves. Shapes: T evaluations, R runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from composer_replication.report.bench_evidence import Floats, gap_growth, log_threshold
from composer_replication.report.bench_families import CLEAN_GAP, HONEST_SWITCH, TOLERATED_GAP
from composer_replication.report.bench_series import Series

EDGE = "at-g0"
"""The null family at the edge of what is tolerated: a rule that is quiet there claims what ours claims."""

CLEAN = "clean"

Path = Callable[[Series], Floats]


@dataclass(frozen=True, slots=True)
class Detector:
    """One rule.

    Attributes:
        name: as in the tables.
        sentence: what it does, with its nominal threshold.
        path: from the series of some runs to its statistic after each evaluation.
        nominal: the threshold it comes with; None: it has to be tuned.
        tuned_on: the null family in which matched thresholds are found.
        threshold_at: the threshold for an error level, where the rule knows one.
        settings: of the ``HeldOutGuard`` behind it; None: another rule.
    """

    name: str
    sentence: str
    path: Path
    nominal: float | None
    tuned_on: str = EDGE
    threshold_at: Callable[[float], float] | None = None
    settings: Mapping[str, float] | None = None


def heldout_guard_path(
    in_loop_TR: Floats, heldout_TR: Floats, *, min_steps: int, decline_patience: int, ema_alpha: float
) -> Floats:
    """``HeldOutGuard``'s gap after each update, infinite where its decline path fires.

    Before ``min_steps`` updates minus infinity: nothing may fire. It fires above
    ``max_proxy_real_gap``: as a threshold to reach, that is the next float.
    """
    in_loop_R, heldout_R = in_loop_TR[0], heldout_TR[0]
    streak_R = np.zeros(in_loop_R.shape, dtype=np.int64)
    path_TR = np.empty_like(in_loop_TR)
    for update in range(len(in_loop_TR)):
        if update:
            old_in_loop_R, old_heldout_R = in_loop_R, heldout_R
            in_loop_R = ema_alpha * in_loop_R + (1 - ema_alpha) * in_loop_TR[update]
            heldout_R = ema_alpha * heldout_R + (1 - ema_alpha) * heldout_TR[update]
            declines_R = _moves(heldout_R, old_heldout_R) & _moves(old_in_loop_R, in_loop_R)
            streak_R = np.where(declines_R, streak_R + 1, 0)
        gap_R = (in_loop_R - in_loop_TR[0]) - (heldout_R - heldout_TR[0])
        path_TR[update] = np.where(streak_R >= decline_patience, np.inf, gap_R)
    path_TR[: min_steps - 1] = -np.inf
    return path_TR


def _moves(low: Floats, high: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """``high`` is above ``low`` by more than four units in the last place, which are rounding."""
    result: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = high - low > 4 * np.spacing(
        np.maximum(np.abs(low), np.abs(high))
    )
    return result


def ema_path(values_TR: Floats, ema_alpha: float) -> Floats:
    """Exponential moving average; the first value is taken as it is."""
    path_TR = np.empty_like(values_TR)
    path_TR[0] = values_TR[0]
    for step in range(1, len(values_TR)):
        path_TR[step] = ema_alpha * path_TR[step - 1] + (1 - ema_alpha) * values_TR[step]
    return path_TR


def cusum_path(increments_TR: Floats) -> Floats:
    """Page's CUSUM: S <- max(0, S + increment), from 0."""
    path_TR = np.empty_like(increments_TR)
    sum_R = np.zeros(increments_TR.shape[1])
    for step, increment_R in enumerate(increments_TR):
        sum_R = np.maximum(0.0, sum_R + increment_R)
        path_TR[step] = sum_R
    return path_TR


def page_hinkley_path(sums_TR: Floats, num_samples_TR: Floats, *, tolerance: float = 0.005) -> Floats:
    """Page-Hinkley on samples that arrive in batches.

    m <- m + sum_i (x_i - running mean - tolerance); the statistic is m - min m so far, the
    start (0) included. The running mean covers the batch itself.
    """
    mean_TR = np.cumsum(sums_TR, axis=0) / np.cumsum(num_samples_TR, axis=0)
    drift_TR = np.cumsum(sums_TR - num_samples_TR * (mean_TR + tolerance), axis=0)
    lowest_TR: Floats = np.minimum(np.minimum.accumulate(drift_TR, axis=0), 0.0)
    path_TR: Floats = drift_TR - lowest_TR
    return path_TR


def z_path(series: Series) -> Floats:
    """z of each evaluation alone: (mean - g0) sqrt(n) / s, with s the samples' standard deviation.

    Where all samples are equal s is 0: minus infinity at or below g0, infinity above.
    """
    n_TR, mean_TR = series.num_samples, series.mean_gap
    squares_TR = (series.gap_counts_TXR[:, 0] + series.gap_counts_TXR[:, 2]).astype(np.float64)
    variance_TR = (squares_TR - n_TR * mean_TR**2) / np.maximum(n_TR - 1, 1)
    excess_TR = mean_TR - TOLERATED_GAP
    with np.errstate(divide="ignore", invalid="ignore"):
        z_TR = excess_TR / np.sqrt(np.maximum(variance_TR, 0.0) / n_TR)
    certain_TR = np.where(excess_TR > 0, np.inf, -np.inf)
    path_TR: Floats = np.where(variance_TR > 1e-12, z_TR, certain_TR)
    return path_TR


def e_process_path(series: Series) -> Floats:
    """Log of the plain e-process: the gap stream alone, started once, at the first evaluation."""
    growth_KX = gap_growth(TOLERATED_GAP, 1)
    logs_TKR = np.cumsum(np.einsum("kx,txr->tkr", growth_KX, series.gap_counts_TXR), axis=0)
    path_TR: Floats = np.logaddexp.reduce(logs_TKR, axis=1) - np.log(len(growth_KX))
    return path_TR


def likelihood_path(series: Series, gap_before: float, gap_after: float) -> Floats:
    """CUSUM of the log likelihood ratio of two gaps of ordinary runs.

    It knows both distributions, as no guard of a real run does.
    """
    switch = HONEST_SWITCH
    before, after = (
        np.array([switch, 1.0 - gap - 2.0 * switch, gap + switch]) for gap in (gap_before, gap_after)
    )
    return cusum_path(np.einsum("x,txr->tr", np.log(after / before), series.gap_counts_TXR))


def _heldout_guard(name: str, settings: Mapping[str, float]) -> Detector:
    from composer_replication.safety import HeldOutGuard

    guard = HeldOutGuard(**settings)  # type: ignore[arg-type]  # counts and numbers share one table
    return Detector(
        name,
        f"HeldOutGuard: gap above {guard.max_proxy_real_gap:g}, or {guard.decline_patience} declines in a row "
        f"(average {guard.ema_alpha:g}, from update {guard.min_steps}); it reads the in-loop reward and H",
        lambda series: heldout_guard_path(
            series.in_loop_TR,
            series.truth_TR,
            min_steps=guard.min_steps,
            decline_patience=guard.decline_patience,
            ema_alpha=guard.ema_alpha,
        ),
        nominal=float(np.nextafter(guard.max_proxy_real_gap, np.inf)),
        settings=settings,
    )


TEST_LIKE: Mapping[str, float] = {
    "min_steps": 3,
    "decline_patience": 3,
    "ema_alpha": 0.5,
    "max_proxy_real_gap": 0.1,
}
LIKELIHOOD_GAPS = (0.10, 0.15, 0.20)


def _tuned_cusum(gap_before: float, gap_after: float, tuned_on: str) -> Detector:
    word = "tuned" if tuned_on == EDGE else "clean"
    return Detector(
        f"cusum-{word}-{round(100 * gap_after):02d}",
        f"CUSUM of the likelihood ratio of gap {gap_after:.2f} against {gap_before:.2f}, the very "
        f"distributions of the runs; tuned on the family {tuned_on}",
        lambda series: likelihood_path(series, gap_before, gap_after),
        nominal=None,
        tuned_on=tuned_on,
    )


def make_detectors() -> tuple[Detector, ...]:
    """Every rule of the benchmark, ours first."""
    return (
        Detector(
            "evidence",
            "EvidenceGuard at alpha 1%: log evidence of all streams",
            lambda series: series.log_evidence_TR,
            nominal=log_threshold(0.01),
            threshold_at=log_threshold,
        ),
        Detector(
            "plain-e-process",
            "the gap stream alone, started once; 1 / alpha",
            e_process_path,
            nominal=float(-np.log(0.01)),
            threshold_at=lambda alpha: float(-np.log(alpha)),
        ),
        _heldout_guard("heldout-guard", {}),
        _heldout_guard("heldout-guard-test-like", TEST_LIKE),
        Detector("gap-threshold", "mean of V - H in one evaluation at .10", lambda s: s.mean_gap, 0.10),
        Detector(
            "gap-average",
            "moving average (.8) of that mean at .10",
            lambda s: ema_path(s.mean_gap, 0.8),
            0.10,
        ),
        Detector(
            "z-test",
            "one-sided z-test of V - H against g0 at 1% in each evaluation",
            z_path,
            nominal=NormalDist().inv_cdf(0.99),
            threshold_at=lambda alpha: NormalDist().inv_cdf(1.0 - alpha),
        ),
        Detector(
            "cusum",
            "Page's CUSUM of V - H - g0 at 12 samples, the warning line of EvidenceGuard",
            lambda s: cusum_path(s.num_samples * (s.mean_gap - TOLERATED_GAP)),
            nominal=12.0,
        ),
        Detector(
            "page-hinkley",
            "Page-Hinkley on the samples V - H, tolerance .005, at 50, as streaming libraries set it",
            lambda s: page_hinkley_path(s.num_samples * s.mean_gap, s.num_samples),
            nominal=50.0,
        ),
        Detector("kl-budget", "KL to the initial policy at .08 nats", lambda s: s.kl_TR, 0.08),
        *(_tuned_cusum(TOLERATED_GAP, gap, EDGE) for gap in LIKELIHOOD_GAPS),
        *(_tuned_cusum(CLEAN_GAP, gap, CLEAN) for gap in LIKELIHOOD_GAPS),
    )
