"""How often HeldOutGuard halts an honest run, how soon it sees a hacked one, and what other settings do.

    python benchmarks/heldout_guard_defaults.py [--runs 3000] [--seed 0] [--heldout 32] [--in-loop 128] [--no-grid]

First the defaults and the settings of the unit tests, row by row, then the grid that the
defaults were chosen from: one JSON line each. What is simulated stands in
``composer_replication.report.bench_heldout``; the folding there equals the real guard's (tested).
"""

from __future__ import annotations

import argparse
import json
from itertools import product

from composer_replication.report.bench_heldout import (
    Sizes,
    guard_runs,
    heldout_guard_section,
    measure,
    worst,
)
from composer_replication.safety import HeldOutGuard

GAPS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6)
PATIENCES = (3, 5, 6, 8, 12)
AVERAGES = (0.5, 0.7, 0.8, 0.9)


def grid(sizes: Sizes, seed: int) -> list[dict[str, object]]:
    """The worst row of every setting, those that satisfy both conditions first, then by delay."""
    min_steps = HeldOutGuard().min_steps
    choices = list(product(AVERAGES, PATIENCES))
    rows: dict[tuple[float, int, float], list[dict[str, object]]] = {
        (*choice, gap): [] for choice in choices for gap in GAPS
    }
    for runs in guard_runs(sizes, seed):
        for ema_alpha, patience in choices:
            settings = {"min_steps": min_steps, "decline_patience": patience, "ema_alpha": ema_alpha}
            for gap, row in zip(GAPS, measure(runs, settings, GAPS), strict=True):
                rows[ema_alpha, patience, gap].append(row)
    found = [
        {"ema_alpha": a, "decline_patience": p, "max_proxy_real_gap": gap, **worst(setting)}
        for (a, p, gap), setting in rows.items()
    ]
    return sorted(found, key=lambda row: (not row["both_hold"], row["worst_median_delay"] or 1e9))


def main() -> None:
    """Print one JSON line a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout", type=int, default=32)
    parser.add_argument("--in-loop", type=int, default=128)
    parser.add_argument("--no-grid", action="store_true", help="leave out the other settings")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.runs, arguments.in_loop, arguments.heldout)
    for entry in heldout_guard_section(sizes, arguments.seed):
        for row in entry.pop("runs"):
            print(json.dumps({"settings": entry["name"], **row}), flush=True)
        print(json.dumps({**entry, "settings": entry["name"]}), flush=True)
    if not arguments.no_grid:
        for row in grid(sizes, arguments.seed):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
