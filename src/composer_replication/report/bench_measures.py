"""False-alarm rates, delays and thresholds, from when each run alarmed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from composer_replication.report.bench_intervals import clopper_pearson

if TYPE_CHECKING:
    from composer_replication.report.bench_evidence import Floats
    from composer_replication.report.bench_runs import Alarms

MATCHED_RATE = 0.01
CURVE_RATES = (0.002, 0.005, MATCHED_RATE, 0.02, 0.05, 0.1, 0.2, 0.4)
"""False-alarm rates of the operating curve, where thresholds are tuned."""


def false_alarms(alarms_R: Alarms) -> dict[str, Any]:
    """How many runs alarmed at all, with the exact 95% interval of their share."""
    num_alarms, num_runs = int(np.count_nonzero(alarms_R)), len(alarms_R)
    low, high = clopper_pearson(num_alarms, num_runs)
    return {"alarms": num_alarms, "runs": num_runs, "rate": num_alarms / num_runs, "ci95": [low, high]}


def delays(alarms_R: Alarms, onset: int) -> dict[str, Any]:
    """Evaluations to the alarm; the first hacked evaluation counts as 1.

    A run halted before the onset is a false alarm: it is counted in ``halted_before`` and left
    out of the rest. A run that never alarms is ``missed``; its delay is infinite, and a median or
    P90 that falls on it is None.
    """
    reached_R = alarms_R[(alarms_R == 0) | (alarms_R >= onset)]
    delays_R = np.where(reached_R == 0, np.inf, reached_R - onset + 1.0)
    row: dict[str, Any] = {
        "runs": len(alarms_R),
        "halted_before": 1.0 - len(reached_R) / len(alarms_R),
        "median": None,
        "p90": None,
        "missed": None,
        "missed_ci95": None,
    }
    if len(delays_R):
        num_missed = int(np.count_nonzero(np.isinf(delays_R)))
        row["median"] = _quantile(delays_R, 0.5)
        row["p90"] = _quantile(delays_R, 0.9)
        row["missed"] = num_missed / len(delays_R)
        row["missed_ci95"] = list(clopper_pearson(num_missed, len(delays_R)))
    return row


def threshold_for(highest_R: Floats, rate: float) -> float | None:
    """The lowest threshold that at most this share of the runs reaches; None if there is none.

    Args:
        highest_R: the highest point of each run's path.
        rate: tolerated share, in [0, 1).
    """
    falling_R = np.sort(highest_R)[::-1]
    first_kept_out = falling_R[int(rate * len(falling_R) + 1e-9)]
    threshold = float(np.nextafter(first_kept_out, np.inf))
    return threshold if np.isfinite(threshold) else None


def _quantile(delays_R: Floats, share: float) -> int | None:
    """The smallest delay that at least this share of the runs does not exceed."""
    found = np.quantile(delays_R, share, method="inverted_cdf")
    return int(found) if np.isfinite(found) else None
