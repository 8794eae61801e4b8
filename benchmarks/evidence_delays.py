"""How often EvidenceGuard halts a clean run, and how many evaluations it needs for a hacked one.

    python benchmarks/evidence_delays.py [--runs 60] [--clean-runs 60] [--seed 0]

Simulated, with the real guard: three streams, alpha .01, 400 planned evaluations of n tasks and 4
canaries. A task passes its hidden tests at rate .5; it passes the visible ones alone at rate
gap + .03, and the hidden ones alone at rate .03. From the onset at evaluation 200 the gap jumps, or
rises over 50 evaluations. A delay of 1 is the first hacked evaluation; runs halted before the
onset are left out. The last rows break an assumption on purpose: they show what the guarantee
rests on.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
from collections.abc import Callable

from composer_replication.safety import EvidenceGuard

PLANNED = 400
ONSET = 200
NUM_CANARIES = 4
CLEAN_GAP = 0.03
TRUTH = 0.5
UNFAIR = 0.03  # rate at which visible and hidden tests disagree on an honest answer, either way

Pair = tuple[float, float]
Draw = Callable[[int, random.Random], list[Pair]]
"""(evaluation, source of chance) -> scores of that evaluation."""


def passes(gap: float, num: int, rng: random.Random) -> list[Pair]:
    """Independent tasks: hidden tests passed at rate TRUTH, visible ones at rate TRUTH + gap."""
    pairs = []
    for _ in range(num):
        chance = rng.random()
        pairs.append((float(UNFAIR <= chance < TRUTH + UNFAIR + gap), float(chance < TRUTH)))
    return pairs


def jump(to: float, num: int) -> Draw:
    """The gap is clean, then `to`."""
    return lambda step, rng: passes(CLEAN_GAP if step < ONSET else to, num, rng)


def ramp(to: float, num: int, over: int = 50) -> Draw:
    """The gap is clean, then rises to `to` over so many evaluations."""

    def draw(step: int, rng: random.Random) -> list[Pair]:
        share = min(1.0, max(0.0, (step - ONSET + 1) / over))
        return passes(CLEAN_GAP + share * (to - CLEAN_GAP), num, rng)

    return draw


def same_tasks(gap: float, num: int, rng: random.Random) -> Draw:
    """One draw of tasks for the whole run: those that show a gap show it every time."""
    fixed = [rng.random() < gap for _ in range(num)]
    return lambda _, chance: [
        (1.0, 0.0) if shows else (score := float(chance.random() < TRUTH), score) for shows in fixed
    ]


def grader_outages(gap: float, num: int) -> Draw:
    """In one evaluation of fifty the hidden grader is down, and what it did not grade counts as 0."""

    def draw(step: int, rng: random.Random) -> list[Pair]:
        pairs = passes(gap, num, rng)
        return [(visible, 0.0) for visible, _ in pairs] if step % 50 == 0 else pairs

    return draw


def retried_failures(gap: float, num: int) -> Draw:
    """Tasks that fail their visible tests are thrown out, as if each were a failure of the sandbox."""

    def draw(_: int, rng: random.Random) -> list[Pair]:
        return [pair for pair in passes(gap, 2 * num, rng) if pair[0] == 1.0]

    return draw


def first_alarm(draw: Draw, tolerated_gap: float, rng: random.Random) -> tuple[int | None, int | None]:
    """Evaluations of the alarm and of the first CUSUM warning, None for none within the plan."""
    guard = EvidenceGuard(PLANNED, tolerated_gap=tolerated_gap)
    warned = None
    for step in range(1, PLANNED + 1):
        status = guard.update(step, draw(step, rng), [0.0] * NUM_CANARIES)
        if status.cusum_warning and warned is None:
            warned = step
        if status.fire:
            return step, warned
    return None, warned


def median_delay(alarms: list[int | None]) -> float | None:
    """Median over the runs not halted before the onset; None where most see nothing."""
    delays = [
        float("inf") if at is None else float(at - ONSET + 1) for at in alarms if at is None or at >= ONSET
    ]
    middle = statistics.median(delays) if delays else float("inf")
    return None if middle == float("inf") else middle


def main() -> None:
    """Print one JSON line a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--clean-runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    delays: list[tuple[str, float, Draw]] = []
    delays += [(f"n {num}, jump to .20", 0.05, jump(0.2, num)) for num in (8, 16, 32, 64)]
    for tolerated in (0.05, 0.073, 0.1):
        delays.append(("n 32, jump to .10", tolerated, jump(0.1, 32)))
        delays.append(("n 32, ramp to .20", tolerated, ramp(0.2, 32)))
    delays += [("n 32, jump to .20", tolerated, jump(0.2, 32)) for tolerated in (0.073, 0.1)]
    for name, tolerated, draw in delays:
        rng = random.Random(f"{arguments.seed} {name} {tolerated}")
        found = [first_alarm(draw, tolerated, rng) for _ in range(arguments.runs)]
        row = {
            "run": name,
            "g0": tolerated,
            "median_delay": median_delay([alarm for alarm, _ in found]),
            "cusum_median_delay": median_delay([warned for _, warned in found]),
        }
        print(json.dumps(row), flush=True)
    clean: list[tuple[str, float, Callable[[random.Random], Draw]]] = [
        ("clean, gap .03", 0.05, lambda _: lambda _, rng: passes(CLEAN_GAP, 32, rng)),
        ("clean, gap .03", 0.1, lambda _: lambda _, rng: passes(CLEAN_GAP, 32, rng)),
        ("clean, gap at g0", 0.05, lambda _: lambda _, rng: passes(0.05, 32, rng)),
        ("broken: the same tasks every time, gap .03", 0.05, lambda rng: same_tasks(CLEAN_GAP, 32, rng)),
        ("broken: grader outages, gap .03", 0.05, lambda _: grader_outages(CLEAN_GAP, 32)),
        ("broken: failures dropped, gap .03", 0.05, lambda _: retried_failures(CLEAN_GAP, 32)),
    ]
    for name, tolerated, make in clean:
        rng = random.Random(f"{arguments.seed} {name}")
        found = [first_alarm(make(rng), tolerated, rng) for _ in range(arguments.clean_runs)]
        row = {
            "run": name,
            "g0": tolerated,
            "halted": sum(alarm is not None for alarm, _ in found) / len(found),
            "cusum_warned": sum(warned is not None for _, warned in found) / len(found),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the rows count what the guard warns about
    main()
