"""Claim: a policy trained on some repositories solves more tasks of repositories it never saw, and one with shuffled rewards does not.

Runs ``recipes/generalise`` once a seed, then its control (``reward.is_shuffled``), one after the other, each by
``composer-rl train`` in a folder of its own under ``--out``. A finished run is not repeated, one that was cut off is
resumed. Then, or with ``--table`` at once, prints what the folders hold: pass rates over fresh samples before and after
(held-out tasks by hidden tests, trained ones by visible tests), 95% Wilson intervals over samples, and for the seeds
together a bootstrap over tasks of the difference, because samples of one task are alike.

    python benchmarks/generalise.py [--out runs/generalise] [--seeds 0 1 2] [--control 0] [--set KEY=VALUE ...] [--table]

Target: after training at least 1.5 times the base's held-out pass rate, intervals apart. Exit code 1 where a run failed;
a missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_replication.tasks.pass_intervals import mean_interval

RECIPE = Path(__file__).parents[1] / "recipes" / "generalise" / "run.toml"
COMMAND = Path(sys.executable).with_name("composer-rl")
HALTED = 5  # the guard stopped it; its rates were measured all the same
GOAL = 1.5
NUM_RESAMPLES = 4000
DASH = "\N{EN DASH}"

Counts = Mapping[str, tuple[int, int]]
"""Passed and samples by task."""


@dataclass(frozen=True)
class Change:
    """Pass counts of the same tasks before and after training."""

    before: Counts
    after: Counts

    def rates(self) -> tuple[float, float]:
        """Mean over tasks, before and after."""
        return _rate(self.before), _rate(self.after)

    def intervals(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """95% over fresh samples on these tasks."""
        return mean_interval(list(self.before.values())), mean_interval(list(self.after.values()))

    def is_apart(self) -> bool:
        """Whether the interval after training lies above the one before."""
        old, new = self.intervals()
        return old[1] < new[0]

    def meets_goal(self) -> bool:
        """Half again the base's rate, with intervals apart."""
        old, new = self.rates()
        return new >= GOAL * old and self.is_apart()

    def over_tasks(self, seed: int = 0) -> tuple[float, float]:
        """95% bootstrap interval of the mean difference: tasks are drawn anew, each with all its samples."""
        differences = [
            self.after[name][0] / self.after[name][1] - passed / samples
            for name, (passed, samples) in sorted(self.before.items())
        ]
        chance = random.Random(seed)
        means = sorted(
            statistics.fmean(chance.choices(differences, k=len(differences))) for _ in range(NUM_RESAMPLES)
        )
        return means[int(0.025 * NUM_RESAMPLES)], means[int(0.975 * NUM_RESAMPLES) - 1]


@dataclass(frozen=True)
class Run:
    """What one run folder says."""

    name: str
    heldout: Change
    trained: Change
    num_steps: int
    verdict: str
    minutes: float


def read_run(folder: Path) -> Run:
    """The rates that ``train`` left in its summary."""
    summary = json.loads((folder / "summary.json").read_text())

    def change(side: str, tests: str) -> Change:
        sides = [summary[when][side]["by_task"] for when in ("before", "after")]
        old, new = ({name: (row[tests], row["samples"]) for name, row in rows.items()} for rows in sides)
        known = sorted(old.keys() & new.keys())  # a task may have lost all its samples to a broken sandbox
        return Change({name: old[name] for name in known}, {name: new[name] for name in known})

    return Run(
        folder.name,
        change("heldout", "hidden"),
        change("train", "visible"),
        int(summary["steps"]),
        str(summary["verdict"]),
        float(summary["seconds"]) / 60,
    )


def pooled(changes: Sequence[Change]) -> Change:
    """The runs' samples of each task together; only tasks that every run has."""
    names = sorted(set.intersection(*(set(change.before) for change in changes)))

    def together(rows: Sequence[Counts]) -> Counts:
        return {name: (sum(r[name][0] for r in rows), sum(r[name][1] for r in rows)) for name in names}

    return Change(together([c.before for c in changes]), together([c.after for c in changes]))


def by_repository(change: Change) -> dict[str, Change]:
    """Of each repository its own tasks; a task's id begins with the repository's name and version."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in change.before:
        names[name.partition("--")[0]].append(name)
    return {
        repository: Change({n: change.before[n] for n in own}, {n: change.after[n] for n in own})
        for repository, own in sorted(names.items())
    }


def table(runs: Sequence[Run], controls: Sequence[Run]) -> str:
    """Markdown: a line a run, the seeds together, and of these a line a repository."""
    lines = [
        "| run | steps | guard | held-out, before | after | times | apart | trained, before | after | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(run) for run in (*runs, *controls)]
    if not runs:
        return "\n".join(lines)
    together = pooled([run.heldout for run in runs])
    low, high = together.over_tasks()
    lines += ["", f"All seeds: {_words(together)}. Difference over tasks: {low:+.3f} to {high:+.3f}."]
    if controls:
        control = pooled([run.heldout for run in controls])
        low, high = control.over_tasks()
        lines += [f"Control: {_words(control)}. Difference over tasks: {low:+.3f} to {high:+.3f}."]
    met = [run.name for run in runs if run.heldout.meets_goal()]
    outcome = "met" if together.meets_goal() else "missed"
    lines += [
        f"Target ({GOAL:g} times, intervals apart): {outcome} together, met by {len(met)} of {len(runs)} alone.",
        "",
        "| held-out repository | tasks | before | after |",
        "|---|---|---|---|",
    ]
    for repository, own in by_repository(together).items():
        old, new = own.rates()
        lines.append(f"| {repository} | {len(own.before)} | {old:.3f} | {new:.3f} |")
    return "\n".join(lines)


def train(name: str, seed: int, folder: Path, settings: Sequence[str]) -> bool:
    """One run to its end, from where it was cut off; whether there is something to read."""
    if (folder / name / "summary.json").is_file():
        return True
    flags = [part for setting in (f"seed={seed}", *settings) for part in ("--set", setting)]
    resume = ["--resume"] if (folder / name / "run.toml").is_file() else []
    command = [str(COMMAND), "train", str(RECIPE), "--out", str(folder / name), *flags, *resume]
    return subprocess.run(command, check=False).returncode in (0, HALTED)


def _rate(counts: Counts) -> float:
    return statistics.fmean(passed / samples for passed, samples in counts.values())


def _words(change: Change) -> str:
    (old, new), (old_ci, new_ci) = change.rates(), change.intervals()
    return f"{old:.3f} ({old_ci[0]:.3f} to {old_ci[1]:.3f}) before, {new:.3f} ({new_ci[0]:.3f} to {new_ci[1]:.3f}) after"


def _cell(rate: float, interval: tuple[float, float]) -> str:
    return f"{rate:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"


def _line(run: Run) -> str:
    cells = [run.name, str(run.num_steps), run.verdict]
    old, new = run.heldout.rates()
    cells += [_cell(*pair) for pair in zip((old, new), run.heldout.intervals(), strict=True)]
    cells += [f"{new / old:.2f}" if old else DASH, "yes" if run.heldout.is_apart() else "no"]
    cells += [_cell(*pair) for pair in zip(run.trained.rates(), run.trained.intervals(), strict=True)]
    return f"| {' | '.join([*cells, f'{run.minutes:.0f}'])} |"


def _arguments(words: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/generalise"), metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--control", type=int, nargs="*", default=[0], metavar="SEED")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--table", action="store_true", help="train nothing: read what is there")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Train what is missing, then print the table."""
    args = _arguments(words)
    wanted = [(f"seed-{seed}", seed, args.settings) for seed in args.seeds]
    wanted += [
        (f"control-{seed}", seed, [*args.settings, "reward.is_shuffled=true"]) for seed in args.control
    ]
    failed = (
        [] if args.table else [name for name, seed, own in wanted if not train(name, seed, args.out, own)]
    )
    there = [read_run(args.out / name) for name, *_ in wanted if (args.out / name / "summary.json").is_file()]
    print(table(*([run for run in there if run.name.startswith(kind)] for kind in ("seed-", "control-"))))
    if failed:
        print(f"failed: {', '.join(failed)}; the same command goes on.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
