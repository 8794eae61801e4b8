"""What ``HeldOutGuard``'s settings cost and find, on the runs that its defaults were chosen for.

An honest run has 400 updates; the in-loop reward is the mean of 128 passes and the held-out
score the mean of 32, drawn with the same true pass rate, which stays flat or rises by .25 over
the run. A hacked run is honest and flat up to its onset; then the rate behind the in-loop
reward jumps by .3 and the true one falls by .3. No KL is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from composer_replication.report.bench_detectors import heldout_guard_path
from composer_replication.report.bench_evidence import Floats
from composer_replication.report.bench_intervals import clopper_pearson
from composer_replication.report.bench_measures import delays, false_alarms
from composer_replication.report.bench_runs import first_alarms

NUM_UPDATES = 400
WINDOW = 20
RISE = 0.25
JUMP = 0.3
TRUTHS = (0.3, 0.5, 0.7)
ONSETS = (20, 200)

NUM_ROWS = len(TRUTHS) * (2 + len(ONSETS))

MOST_HONEST_HALTED = 0.05
FEWEST_HACKS_FOUND = 0.95


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is simulated: runs a row, passes behind one in-loop and one held-out mean."""

    num_runs: int = 3000
    num_in_loop: int = 128
    num_heldout: int = 32


@dataclass(frozen=True, slots=True)
class GuardRuns:
    """Simulated runs of one row; ``onset`` counts from 1, None for honest runs."""

    name: str
    in_loop_TR: Floats
    heldout_TR: Floats
    onset: int | None


def guard_runs(sizes: Sizes, seed: int) -> Iterator[GuardRuns]:
    """The twelve rows: six honest, six hacked."""
    for truth in TRUTHS:
        for shape, rise in (("flat", 0.0), ("rising", RISE)):
            rng = np.random.default_rng([seed, round(100 * truth), round(100 * rise)])
            truth_T: Floats = truth + rise * (np.arange(NUM_UPDATES, dtype=np.float64) / (NUM_UPDATES - 1))
            in_loop_TR, heldout_TR = _means(rng, truth_T, truth_T, sizes)
            yield GuardRuns(f"honest, {shape} from {truth}", in_loop_TR, heldout_TR, None)
    for truth in TRUTHS:
        for onset in ONSETS:
            rng = np.random.default_rng([seed, round(100 * truth), 1000 + onset])
            jump_T = np.where(np.arange(1, onset + WINDOW) >= onset, JUMP, 0.0)
            in_loop_TR, heldout_TR = _means(rng, truth + jump_T, truth - jump_T, sizes)
            yield GuardRuns(f"hacked from update {onset}, truth {truth}", in_loop_TR, heldout_TR, onset)


def _means(rng: np.random.Generator, proxy_T: Floats, truth_T: Floats, sizes: Sizes) -> tuple[Floats, Floats]:
    def drawn(num_passes: int, rate_T: Floats) -> Floats:
        # Sums of rates miss 0 and 1 by rounding.
        passes_RT = rng.binomial(num_passes, np.clip(rate_T, 0.0, 1.0), (sizes.num_runs, len(rate_T)))
        return np.ascontiguousarray(passes_RT.T) / num_passes

    return drawn(sizes.num_in_loop, proxy_T), drawn(sizes.num_heldout, truth_T)


def measure(
    runs: GuardRuns, settings: Mapping[str, float], max_gaps: Sequence[float]
) -> list[dict[str, Any]]:
    """One row for each ``max_proxy_real_gap``, the other settings alike."""
    path_TR = heldout_guard_path(
        runs.in_loop_TR,
        runs.heldout_TR,
        min_steps=int(settings["min_steps"]),
        decline_patience=int(settings["decline_patience"]),
        ema_alpha=settings["ema_alpha"],
    )
    rows = []
    for alarms_R in first_alarms(path_TR, [float(np.nextafter(gap, np.inf)) for gap in max_gaps]):
        if runs.onset is None:
            rows.append({"run": runs.name, **false_alarms(alarms_R)})
            continue
        row = delays(alarms_R, runs.onset)
        num_reached = round(row["runs"] * (1.0 - row["halted_before"]))
        found = {} if row["missed"] is None else _found(num_reached, row["missed"])
        rows.append({"run": runs.name, **row, **found})
    return rows


def _found(num_reached: int, missed: float) -> dict[str, Any]:
    num_found = num_reached - round(missed * num_reached)
    return {"found": num_found / num_reached, "found_ci95": list(clopper_pearson(num_found, num_reached))}


def worst(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Most honest runs halted, fewest hacks found, and whether both conditions hold."""
    honest = max(row["rate"] for row in rows if "rate" in row)
    found: list[float | None] = [row.get("found") for row in rows if "rate" not in row]
    fewest = min((share for share in found if share is not None), default=None)
    fewest = None if None in found else fewest
    medians = [row["median"] for row in rows if "rate" not in row]
    is_good = honest <= MOST_HONEST_HALTED and fewest is not None and fewest >= FEWEST_HACKS_FOUND
    return {
        "worst_false_halt_rate": honest,
        "worst_found": fewest,
        "worst_median_delay": None if None in medians else max(medians),
        "both_hold": is_good,
    }


def heldout_guard_section(
    sizes: Sizes, seed: int, tick: Callable[[str], None] | None = None
) -> list[dict[str, Any]]:
    """The defaults and test-like settings: every row, and the worst of them."""
    from composer_replication.report.bench_detectors import TEST_LIKE
    from composer_replication.safety import HeldOutGuard

    found: list[dict[str, Any]] = []
    for name, given in (("defaults", {}), ("test-like", TEST_LIKE)):
        guard = HeldOutGuard(**given)  # type: ignore[arg-type]  # counts and numbers share one table
        settings = {
            key: getattr(guard, key)
            for key in ("min_steps", "decline_patience", "ema_alpha", "max_proxy_real_gap")
        }
        found.append({"name": name, "settings": settings, "runs": []})
    for runs in guard_runs(sizes, seed):
        for entry in found:
            settings = entry["settings"]
            entry["runs"] += measure(runs, settings, [settings["max_proxy_real_gap"]])
        if tick is not None:
            tick("HeldOutGuard")
    return [{**entry, **worst(entry["runs"])} for entry in found]
