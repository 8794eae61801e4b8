"""What one update of each guard costs, in pure Python.

    python benchmarks/evidence_update_seconds.py [--updates 300] [--samples 32]

Claims: all streams of EvidenceGuard together under 2 milliseconds at 32 tasks and 4 canaries an
evaluation, and one fold of HeldOutGuard under 50 microseconds, both as medians. Scores with two
values are the usual case; scores that are all different are the dearest.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from composer_replication.safety import EvidenceGuard, HeldOutGuard

NUM_CANARIES = 4


def evidence_seconds(num_updates: int, num_samples: int, draw: Callable[[], float]) -> list[float]:
    """Seconds of each update of an honest run: hidden scores equal the visible ones but for a tenth."""
    guard = EvidenceGuard(num_updates, tolerated_gap=0.1)
    rng = random.Random(1)
    seconds = []
    for step in range(1, num_updates + 1):
        visible = [draw() for _ in range(num_samples)]
        pairs = [(score, score if rng.random() < 0.9 else score / 2) for score in visible]
        start = time.perf_counter()
        guard.update(step, pairs, [0.0] * NUM_CANARIES)
        seconds.append(time.perf_counter() - start)
    return seconds


def heldout_seconds(num_updates: int) -> list[float]:
    """Seconds of each fold of a flat run."""
    guard = HeldOutGuard()
    rng = random.Random(0)
    seconds = []
    for step in range(num_updates):
        reward, score = rng.random(), rng.random()
        start = time.perf_counter()
        guard.update(step, in_loop_reward=reward, heldout_score=score, kl_to_init=0.01)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Print median and quickest of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--samples", type=int, default=32)
    arguments = parser.parse_args()
    rng = random.Random(0)
    rows = {
        "EvidenceGuard, scores 0 and 1": evidence_seconds(
            arguments.updates, arguments.samples, lambda: float(rng.random() < 0.5)
        ),
        "EvidenceGuard, all scores different": evidence_seconds(
            arguments.updates, arguments.samples, rng.random
        ),
        "HeldOutGuard": heldout_seconds(arguments.updates),
    }
    for name, seconds in rows.items():
        quickest, median = min(seconds), statistics.median(seconds)
        print(f"{name:<36} median {median * 1e6:7.1f} us   quickest {quickest * 1e6:7.1f} us")


if __name__ == "__main__":
    main()
