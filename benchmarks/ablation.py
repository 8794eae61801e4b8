"""Claim: none. What do hints and preferences between siblings each add to GRPO on the small model?

Three arms, each by ``composer-rl train recipes/ablation/run.toml`` with its own keys and nothing else changed: tasks,
prompts, steps, evaluation and seeds are the same.

    python benchmarks/ablation.py                             # what is missing of seeds 0, 1, 2, then the table
    python benchmarks/ablation.py --only right-hints --seed 1 # one run
    python benchmarks/ablation.py --table                     # what the journal holds

A finished run is one line of ``recipes/ablation/journal.jsonl``, so the runs may be spread over days and machines: commit
the journal. A run that was cut off is resumed from its folder under ``--out``, where that is still there, and made anew where
not. Lines of other settings (another recipe, other ``--set``) stay in the journal and are left out of the table. Intervals are
95%, Student's t over seeds; differences are taken seed by seed. Exit code 1 where a run failed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from seed_journal import Line, add_line, fingerprint, read_run, train

from composer_replication.run_folder import read_jsonl

FOLDER = Path(__file__).parents[1] / "recipes" / "ablation"
HINTS = ("trainer.alpha_sdpo=0.5",)
ARMS: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "right-hints": HINTS,
    "siblings": ("trainer.beta_replay=0.1", "replay.sibling_pairs=true"),
}
MEASURES = ("held-out before", "held-out after", "trained before", "trained after", "reward of all steps")
FIGURES = {
    "sdpo/turns": "hinted turns a step",
    "sdpo/divergence": "divergence from the teacher, nats a token",
    "sdpo/importance_weight": "importance weight",
    "replay/pairs": "pairs a step",
    "replay/accuracy": "share of pairs in order",
    "replay/reward_margin": "margin",
}
DASH = "\N{EN DASH}"


def t_quantile(freedom: int, inside: float = 0.95) -> float:
    """t with P(-t < T < t) = ``inside`` for Student's T with so many degrees of freedom, by bisection.

    The probability is a finite sum in theta = atan(t / sqrt(freedom)): Abramowitz and Stegun 26.7.3 and 26.7.4.
    """

    def probability(t: float) -> float:
        theta, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
        term, total = (math.cos(theta) if odd else 1.0), 0.0
        for k in range(odd, freedom - 1, 2):
            total += term
            term *= (k + 1) / (k + 2) * math.cos(theta) ** 2
        total *= math.sin(theta)
        return 2.0 / math.pi * (theta + total) if odd else total

    low, high = 0.0, 1e6
    while high - low > 1e-9 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if probability(middle) < inside else (low, middle)
    return high


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% for the mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


# ---- one run ------------------------------------------------------------------------------------


def read_arm(folder: Path) -> dict[str, Any]:
    """The run's line, and the mean over its steps of the reward and of the arm's own figures."""
    steps = read_jsonl(folder / "metrics.jsonl")
    known = {name: [row[name] for row in steps if row.get(name) is not None] for name in ("reward", *FIGURES)}
    return {
        **read_run(folder),
        **{name: statistics.fmean(values) for name, values in known.items() if values},
    }


def train_arm(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """One run to its end; its line of the journal, None where it failed."""
    settings = [*args.settings, *ARMS[arm]]
    mark = fingerprint(args.recipe, settings)
    folder = args.out / f"{arm}-{seed}-{mark[:8]}"
    if not train(args.recipe, folder, seed, settings):
        return None
    return {"arm": arm, "seed": seed, "settings": mark, **read_arm(folder)}


# ---- the table ----------------------------------------------------------------------------------


def rate(counts: Mapping[str, Sequence[int]]) -> float:
    """Mean over tasks of the share of samples that passed."""
    return statistics.fmean(passed / samples for passed, samples in counts.values())


def measures(line: Line) -> dict[str, float]:
    """The numbers that arms are compared by."""
    rates = [rate(line[side][when]) for side in ("heldout", "trained") for when in ("before", "after")]
    return dict(zip(MEASURES, [*rates, line["reward"]], strict=True))


def table(lines: Iterable[Line]) -> str:
    """Markdown: rates of each arm, its differences to plain GRPO, its own figures."""
    by_arm: dict[str, dict[int, Line]] = {arm: {} for arm in ARMS}
    for line in lines:
        by_arm[line["arm"]].setdefault(line["seed"], line)
    parts = [_rates(by_arm), _differences(by_arm), _figures(by_arm)]
    kept = [line for of_arm in by_arm.values() for line in of_arm.values()]
    stores, halted = {line["tasks"] for line in kept}, [line for line in kept if line["verdict"] != "clean"]
    if halted:
        names = ", ".join(
            f"{line['arm']} {line['seed']} ({line['verdict']}, {line['steps']} steps)" for line in halted
        )
        parts.append(f"Not clean: {names}.")
    if len(stores) > 1:
        parts.append(
            f"**The runs are of {len(stores)} different sets of tasks: their rates cannot be compared.**"
        )
    return "\n\n".join(parts)


def _rates(by_arm: Mapping[str, Mapping[int, Line]]) -> str:
    rows = [["arm", "seeds", *MEASURES, "minutes a run"]]
    for arm, lines in by_arm.items():
        found = [measures(line) for line in lines.values()]
        cells = [_cell([each[name] for each in found]) for name in MEASURES]
        minutes = statistics.fmean(line["minutes"] for line in lines.values()) if lines else None
        rows.append([arm, str(len(lines)), *cells, DASH if minutes is None else f"{minutes:.1f}"])
    return _markdown(rows)


def _differences(by_arm: Mapping[str, Mapping[int, Line]]) -> str:
    """By the seeds that an arm and plain GRPO both have."""
    wanted = [(arm, "grpo") for arm in by_arm if arm != "grpo"]
    after = [name for name in MEASURES if "before" not in name]
    rows = [["difference", "seeds", *after]]
    for arm, other in wanted:
        seeds = sorted(by_arm[arm].keys() & by_arm[other].keys())
        pairs = [(measures(by_arm[arm][seed]), measures(by_arm[other][seed])) for seed in seeds]
        cells = [_cell([own[name] - base[name] for own, base in pairs], sign="+") for name in after]
        rows.append([f"{arm} less {other}", str(len(seeds)), *cells])
    return _markdown(rows)


def _figures(by_arm: Mapping[str, Mapping[int, Line]]) -> str:
    rows = [["mean over steps", *ARMS]]
    for name, words in FIGURES.items():
        cells = [_cell([line[name] for line in by_arm[arm].values() if name in line]) for arm in ARMS]
        rows.append([words, *cells])
    return _markdown(rows)


def _cell(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return DASH
    mean, ends = statistics.fmean(values), interval(values)
    return f"{mean:{sign}.3f}" + ("" if ends is None else f" ({ends[0]:{sign}.3f} to {ends[1]:{sign}.3f})")


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *body])


# ---- the command --------------------------------------------------------------------------------


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*ARMS], default=[*ARMS], metavar="ARM")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="train nothing: read the journal")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"), metavar="DIR")
    parser.add_argument("--recipe", type=Path, default=FOLDER / "run.toml", metavar="RECIPE.toml")
    parser.add_argument("--journal", type=Path, default=FOLDER / "journal.jsonl", metavar="FILE")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Train what the journal lacks, a seed in all arms before the next, then print the table."""
    args = _arguments(words)

    @cache
    def mark(arm: str) -> str:
        known: str = fingerprint(args.recipe, [*args.settings, *ARMS[arm]])
        return known

    def mine() -> list[dict[str, Any]]:
        return [
            line
            for line in read_jsonl(args.journal)
            if line["arm"] in ARMS and line["settings"] == mark(line["arm"])
        ]

    failed = []
    for seed in args.seed if not args.table else ():
        for arm in args.only:
            if any((line["arm"], line["seed"]) == (arm, seed) for line in mine()):
                continue
            line = train_arm(arm, seed, args)
            if line is None:
                failed.append(f"{arm} {seed}")
            else:
                add_line(args.journal, line)
    print(table(mine()))
    num_others = len(read_jsonl(args.journal)) - len(mine())
    if num_others:
        print(f"\n{num_others} lines of other settings are left out.")
    if failed:
        print(f"failed: {', '.join(failed)}; the same command goes on.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
