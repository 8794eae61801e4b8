"""The guard's benchmark: how often does it halt honest runs, and how soon does it see hacked ones?

    run_guard_bench(num_runs) -> result      detectors x families, JSON-safe
    plain(result)                            what a person reads

A detector is a path: after each evaluation one number, and an alarm once it reaches a threshold, so that one simulation
answers for every threshold. Ours is the log evidence of ``EvidenceSimulator``; ``HeldOutGuard`` is folded as the real one
folds (tests hold both to the real guards); the others are the usual rules. Each stands there twice: at the threshold it
comes with (nominal), and at one tuned so that 1% of the runs at the edge of what is tolerated alarm (matched), on runs of a
seed that nothing else has. Shapes as in ``bench_runs``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from composer_replication.report import bench_runs as runs
from composer_replication.report.bench_runs import FAMILIES, TOLERATED_GAP, Floats, Series
from composer_replication.safety import HeldOutGuard
from composer_replication.tasks.difficulty import wilson

EDGE, CLEAN = "at-g0", "clean"
"""Null families that thresholds are tuned on: the edge of what is tolerated, and an ordinary run."""

MATCHED_RATE = 0.01
HEADLINE = "jump"
"""The hacked family whose delay stands beside a detector's name."""

SEED = 20_260_101
"""The seed of the published figures; one more is that of the runs which thresholds are tuned on."""

Row = dict[str, Any]
Alarms = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Detector:
    """One rule: ``path`` gives its statistic after each evaluation, [T, R], from the series of some runs.

    ``nominal`` is the threshold it comes with, None where it has to be tuned; ``tuned_on`` the null family in which the
    matched one is found.
    """

    name: str
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
            parts_R = _is_above(in_loop_R, old_in_loop_R) & _is_above(old_heldout_R, heldout_R)
            streak_R = np.where(parts_R, streak_R + 1, 0)
        gap_R = (in_loop_R - in_loop_TR[0]) - (heldout_R - heldout_TR[0])
        path_TR[update] = np.where(streak_R >= guard.decline_patience, np.inf, gap_R)
    path_TR[: guard.min_steps - 1] = -np.inf
    return path_TR


def _is_above(high: Floats, low: Floats) -> npt.NDArray[np.bool_]:
    """Whether it is so by more than four units in the last place, which are rounding."""
    return high - low > 4 * np.spacing(np.maximum(np.abs(low), np.abs(high)))


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
    return np.where(variance_TR > 1e-12, z_TR, np.where(excess_TR > 0, np.inf, -np.inf))


def e_process_path(series: Series) -> Floats:
    """Log of the plain e-process: the gap stream alone, started once, at the first evaluation."""
    growth_TKR = np.einsum("kx,txr->tkr", runs.GAP_GROWTH_KX, series.gap_counts_TXR)
    path_TR: Floats = np.logaddexp.reduce(np.cumsum(growth_TKR, axis=0), axis=1) - np.log(growth_TKR.shape[1])
    return path_TR


def likelihood_path(series: Series, gap_before: float, gap_after: float) -> Floats:
    """CUSUM of the log likelihood ratio of two gaps of ordinary runs: it knows both distributions."""
    before, after = (
        np.array([runs.HONEST_SWITCH, 1.0 - gap - 2.0 * runs.HONEST_SWITCH, gap + runs.HONEST_SWITCH])
        for gap in (gap_before, gap_after)
    )
    return cusum_path(np.einsum("x,txr->tr", np.log(after / before), series.gap_counts_TXR))


_HELDOUT = HeldOutGuard()
DETECTORS = (
    Detector("evidence", lambda s: s.log_evidence_TR, runs.EvidenceSimulator.THRESHOLD),
    Detector("plain-e-process", e_process_path, -math.log(runs.ALPHA)),
    Detector("heldout-guard", lambda s: heldout_guard_path(_HELDOUT, s.in_loop_TR, s.truth_TR),
             float(np.nextafter(_HELDOUT.max_proxy_real_gap, np.inf))),
    Detector("gap-threshold", lambda s: s.mean_gap_TR, 0.10),
    Detector("z-test", z_path, NormalDist().inv_cdf(0.99)),
    Detector("cusum", lambda s: cusum_path(s.num_samples_TR * (s.mean_gap_TR - TOLERATED_GAP)), 12.0),
    Detector("kl-budget", lambda s: s.kl_TR, 0.08),
    Detector("cusum-tuned-15", lambda s: likelihood_path(s, TOLERATED_GAP, 0.15), None),
    Detector("cusum-clean-15", lambda s: likelihood_path(s, runs.CLEAN_GAP, 0.15), None, tuned_on=CLEAN),
)  # fmt: skip
"""Every rule of the benchmark, ours first; 12 samples is also the warning line of ``EvidenceGuard``."""


# ------------------------------------------------------------------------------- measured


def run_guard_bench(
    num_runs: int = 10_000,
    num_tasks: int = 32,
    *,
    seed: int = SEED,
    families: Sequence[str] = (),
    report: Callable[[int, int, str], None] | None = None,
) -> Row:
    """Simulate and measure; the same settings give the same figures.

    Args:
        num_runs: of each null family; hacked families have half of it.
        num_tasks: fresh tasks an evaluation.
        seed: of everything that is drawn.
        families: names; empty: all. Thresholds are tuned on two null families in any case.
        report: takes (done, total, what) after each family.
    """
    chosen = [one for one in FAMILIES if not families or one.name in families]
    sizes = {one.name: num_runs if one.onset is None else max(1, num_runs // 2) for one in chosen}
    matched: dict[str, float | None] = {}
    for family in (one for one in FAMILIES if one.name in (EDGE, CLEAN)):
        tuned = [rule for rule in DETECTORS if rule.tuned_on == family.name]
        chunks = runs.simulate(family, num_runs, seed + 1, num_tasks)
        highest = [[rule.path(series).max(axis=0) for rule in tuned] for series in chunks]
        for rule, parts in zip(tuned, zip(*highest, strict=True), strict=True):
            matched[rule.name] = threshold_for(np.concatenate(parts), MATCHED_RATE)
    rules = [
        (f"{rule.name} ({mode})", rule, threshold)
        for rule in DETECTORS
        for mode, threshold in (("nominal", rule.nominal), ("matched", matched[rule.name]))
        if mode == "matched" or threshold is not None
    ]
    alarms: dict[str, list[Alarms]] = {}
    for done, family in enumerate(chosen, start=1):
        found = []
        for series in runs.simulate(family, sizes[family.name], seed, num_tasks):
            paths = {rule.name: rule.path(series) for rule in DETECTORS}
            found.append([first_alarms(paths[r.name], math.inf if t is None else t) for _, r, t in rules])
        alarms[family.name] = [np.concatenate(rows) for rows in zip(*found, strict=True)]
        if report is not None:
            report(done, len(chosen), family.name)
    return {
        "detectors": [
            _row(name, threshold, {family: rows[place] for family, rows in alarms.items()})
            for place, (name, _, threshold) in enumerate(rules)
        ],
        "families": [
            {"name": f.name, "onset": f.onset, "sentence": f.sentence, "runs": sizes[f.name]} for f in chosen
        ],
        "settings": {
            "runs": num_runs,
            "tasks_per_evaluation": num_tasks,
            "seed": seed,
            "evaluations": runs.NUM_EVALUATIONS,
            "matched_rate": MATCHED_RATE,
        },
    }


def first_alarms(path_TR: Floats, threshold: float) -> Alarms:
    """The first evaluation, from 1, at which each run reaches the threshold; 0: never. Shape [R]."""
    reached_TR = path_TR >= threshold
    return np.where(reached_TR.any(axis=0), reached_TR.argmax(axis=0) + 1, 0)


def threshold_for(highest_R: Floats, rate: float) -> float | None:
    """The lowest threshold that at most this share of the runs reaches, from the highest point of each path.

    None if there is none.
    """
    first_kept_out = np.sort(highest_R)[::-1][int(rate * len(highest_R) + 1e-9)]
    threshold = float(np.nextafter(first_kept_out, np.inf))
    return threshold if math.isfinite(threshold) else None


def false_alarms(alarms_R: Alarms) -> Row:
    """How many runs alarmed at all, with the 95% interval of their share."""
    num, num_runs = int(np.count_nonzero(alarms_R)), len(alarms_R)
    return {"alarms": num, "runs": num_runs, "rate": num / num_runs, "ci95": list(wilson(num, num_runs))}


def delays(alarms_R: Alarms, onset: int) -> Row:
    """Evaluations to the alarm; the first hacked evaluation counts as 1.

    A run halted before the onset is a false alarm: it is counted in ``halted_before`` and left
    out of the rest. A run that never alarms is ``missed``; its delay is infinite, and a median or
    P90 that falls on it is None.
    """
    reached_R = alarms_R[(alarms_R == 0) | (alarms_R >= onset)]
    delays_R = np.where(reached_R == 0, np.inf, reached_R - onset + 1.0)
    before = 1.0 - len(reached_R) / len(alarms_R)
    if not len(delays_R):
        return {"halted_before": before, "median": None, "p90": None, "missed": None}
    late = np.quantile(delays_R, (0.5, 0.9), method="inverted_cdf")
    median, p90 = (int(delay) if np.isfinite(delay) else None for delay in late)
    return {"halted_before": before, "median": median, "p90": p90, "missed": float(np.isinf(delays_R).mean())}


def _row(name: str, threshold: float | None, alarms: Mapping[str, Alarms]) -> Row:
    """One detector at one threshold. The headline rate is the largest over the null families."""
    onsets = {} if threshold is None else {f.name: f.onset for f in FAMILIES if f.name in alarms}
    rates = {key: false_alarms(alarms[key]) for key, onset in onsets.items() if onset is None}
    found = {key: delays(alarms[key], onset) for key, onset in onsets.items() if onset is not None}
    worst = max(rates, key=lambda key: float(rates[key]["rate"]), default=None)
    headline = found.get(HEADLINE, {})
    return {
        "name": name,
        "threshold": threshold,
        "false_alarm_rate": rates[worst]["rate"] if worst else None,
        "ci95": rates[worst]["ci95"] if worst else None,
        "worst_family": worst,
        "median_delay": headline.get("median"),
        "p90_delay": headline.get("p90"),
        "missed": headline.get("missed"),
        "halted_before": headline.get("halted_before"),
        "false_alarms": rates,
        "delays": found,
    }


# ---------------------------------------------------------------------------- what a person reads

_EXPLAINED = (
    "False alarms in the null family where they are most frequent, with the 95% interval; delay in evaluations "
    "after a jump of the gap from .03 to .20, of the runs not halted before. Matched: the threshold that 1% of "
    "runs at the edge reach (at-g0; the cusum-clean ones: clean)."
)


def plain(result: Row) -> str:
    """What a terminal shows: one row a detector and threshold, without what it did in each family."""
    preamble = (
        "{runs:,} runs a null family, half of it elsewhere; {evaluations} evaluations of {tasks_per_evaluation} "
        "tasks; seed {seed}."
    ).format(**result["settings"])
    shown = [key for key in result["detectors"][0] if key not in {"false_alarms", "delays"}]
    cells = [[key.replace("_", " ") for key in shown]]
    cells += [[_cell(row[key]) for key in shown] for row in result["detectors"]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join([preamble, _EXPLAINED, "", *lines])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    return "–" if value is None else value if isinstance(value, str) else f"{value:.4g}"
