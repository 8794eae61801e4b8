"""How often HeldOutGuard halts an honest run, and how soon it sees a hacked one.

    python benchmarks/guard_defaults.py [--runs 2000] [--seed 0] [--heldout 32] [--in-loop 128]

Simulated, with the real guard. An honest run has 400 updates; the in-loop reward is
the mean of 128 passes and the held-out score the mean of 32, both drawn with the same
true pass rate, which stays flat or rises by .25 over the run. A hacked run is honest
and flat until its onset, then the pass rate behind the in-loop reward jumps by .3 and
the true one falls by .3. No KL is given: it is not what the figures are about.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import dataclass

import numpy as np

from composer_replication.safety import HeldOutGuard

NUM_UPDATES = 400
WINDOW = 20
RISE = 0.25
JUMP = 0.3
TRUTHS = (0.3, 0.5, 0.7)
ONSETS = (20, 200)
SETTINGS: dict[str, dict[str, float]] = {
    "defaults": {},
    "test-like": {
        "min_steps": 3,
        "decline_patience": 3,
        "ema_alpha": 0.5,
        "kl_hard_stop": 0.08,
        "max_proxy_real_gap": 0.1,
    },
}


@dataclass(frozen=True)
class Sizes:
    """How much is simulated: runs a row, passes behind one in-loop and one held-out mean."""

    num_runs: int
    num_in_loop: int
    num_heldout: int


def halted_at(settings: dict[str, float], in_loop: list[float], heldout: list[float]) -> int | None:
    """Number of updates before the halt, None when the run was never halted."""
    guard = HeldOutGuard(**settings)  # type: ignore[arg-type]  # counts and numbers share one table
    for update, (reward, score) in enumerate(zip(in_loop, heldout, strict=True)):
        if guard.update(update, in_loop_reward=reward, heldout_score=score).fire:
            return update
    return None


def halts(
    settings: dict[str, float],
    proxy_T: np.ndarray,
    truth_T: np.ndarray,
    sizes: Sizes,
    rng: np.random.Generator,
) -> list[int | None]:
    """Where each simulated run was halted; proxy_T and truth_T are true pass rates by update."""
    shape = (sizes.num_runs, len(proxy_T))
    in_loop_RT = rng.binomial(sizes.num_in_loop, proxy_T, shape) / sizes.num_in_loop
    heldout_RT = rng.binomial(sizes.num_heldout, truth_T, shape) / sizes.num_heldout
    return [halted_at(settings, *pair) for pair in zip(in_loop_RT.tolist(), heldout_RT.tolist(), strict=True)]


def upper_bound(num_hits: int, num_trials: int) -> float:
    """Upper end of the 95% Wilson interval of a share."""
    z, share = 1.96, num_hits / num_trials
    middle = share + z * z / (2 * num_trials)
    spread = z * math.sqrt(share * (1 - share) / num_trials + z * z / (4 * num_trials**2))
    return (middle + spread) / (1 + z * z / num_trials)


def honest_rows(name: str, sizes: Sizes, seed: int) -> list[dict[str, object]]:
    """False halts on flat and rising honest runs, one row each."""
    rows: list[dict[str, object]] = []
    for start in TRUTHS:
        for shape, rise in (("flat", 0.0), ("rising", RISE)):
            rng = np.random.default_rng([seed, round(100 * start), round(100 * rise)])
            truth_T = start + rise * np.linspace(0.0, 1.0, NUM_UPDATES)
            num_halted = sum(at is not None for at in halts(SETTINGS[name], truth_T, truth_T, sizes, rng))
            rows.append(
                {
                    "settings": name,
                    "run": f"honest, {shape} from {start}",
                    "false_halt_rate": num_halted / sizes.num_runs,
                    "upper95": round(upper_bound(num_halted, sizes.num_runs), 4),
                }
            )
    return rows


def hacked_rows(name: str, sizes: Sizes, seed: int) -> list[dict[str, object]]:
    """Detection of a jump within the window, one row an onset and truth.

    A run halted before its onset is a false halt, not a detection: it is left out of
    the detection rate and counted on its own.
    """
    rows: list[dict[str, object]] = []
    for truth in (0.35, 0.5, 0.65):
        for onset in ONSETS:
            rng = np.random.default_rng([seed, round(100 * truth), onset])
            truth_T = np.full(onset + WINDOW, truth)
            proxy_T = truth_T.copy()
            proxy_T[onset:] += JUMP
            truth_T[onset:] -= JUMP
            stops = halts(SETTINGS[name], proxy_T, truth_T, sizes, rng)
            reached = [at for at in stops if at is None or at >= onset]
            delays = sorted(at - onset + 1 for at in reached if at is not None)
            rows.append(
                {
                    "settings": name,
                    "run": f"hacked at update {onset}, truth {truth}",
                    "halted_before": (sizes.num_runs - len(reached)) / sizes.num_runs,
                    "detected": len(delays) / len(reached) if reached else None,
                    "median_delay": statistics.median(delays) if delays else None,
                }
            )
    return rows


def main() -> None:
    """Print one JSON line a row, then the worst row of each setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout", type=int, default=32)
    parser.add_argument("--in-loop", type=int, default=128)
    arguments = parser.parse_args()
    sizes = Sizes(arguments.runs, arguments.in_loop, arguments.heldout)
    for name in SETTINGS:
        honest = honest_rows(name, sizes, arguments.seed)
        hacked = hacked_rows(name, sizes, arguments.seed)
        for row in [*honest, *hacked]:
            print(json.dumps(row), flush=True)
        detected = [float(str(row["detected"])) for row in hacked if row["detected"] is not None]
        delays = [float(str(row["median_delay"])) for row in hacked if row["median_delay"] is not None]
        print(
            json.dumps(
                {
                    "settings": name,
                    "worst_false_halt_rate": max(float(str(row["false_halt_rate"])) for row in honest),
                    "best_false_halt_rate": min(float(str(row["false_halt_rate"])) for row in honest),
                    "worst_detected": min(detected, default=None),
                    "worst_median_delay": max(delays, default=None),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
