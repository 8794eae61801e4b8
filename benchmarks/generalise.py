"""Claim: a policy trained on some repositories solves more tasks of repositories it never saw, and one with shuffled rewards does not.

Runs ``recipes/generalise`` once a seed, then its control (``reward.is_shuffled``), one after the other, each by
``composer-rl train`` in a folder of its own under ``--out``. A finished run is one line of
``recipes/generalise/journal.jsonl`` and is not repeated, so seeds may be spread over days and machines: commit the
journal. One that was cut off is resumed. Then, or with ``--table`` at once, prints what the journal holds: pass rates over fresh samples before and after
(held-out tasks by hidden tests, trained ones by visible tests), 95% Wilson intervals over samples, and for the seeds
together a bootstrap over tasks of the difference, because samples of one task are alike.

    python benchmarks/generalise.py [--out runs/generalise] [--seeds 0 1 2] [--control 0] [--set KEY=VALUE ...] [--journal FILE] [--table]

Target: after training at least 1.5 times the base's held-out pass rate, intervals apart. Exit code 1 where a run failed;
a missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seed_journal import Line, add_line, fingerprint, read_run, train

from composer_replication.run_folder import read_jsonl
from composer_replication.tasks.difficulty import wilson

FOLDER = Path(__file__).parents[1] / "recipes" / "generalise"
RECIPE = FOLDER / "run.toml"
CONTROL = ("reward.is_shuffled=true",)
GOAL = 1.5
NUM_RESAMPLES = 4000
DASH = "\N{EN DASH}"

Counts = Mapping[str, tuple[int, int]]
"""Passed and samples by task."""


def mean_interval(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Wilson's interval at 95% for the mean pass rate of some tasks, each with (passed, samples).

    With n = tasks x the fewest samples of a task: the variance of the mean is the sum of p_i(1-p_i)/n_i over T^2,
    which is at most p(1-p)/n at the mean p, because p(1-p) is concave. It speaks of fresh samples on these tasks.
    """
    mean = sum(passed / samples for passed, samples in counts) / len(counts)
    fewest = len(counts) * min(samples for _, samples in counts)
    return wilson(mean * fewest, fewest)


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
    """One finished run."""

    name: str
    heldout: Change
    trained: Change
    num_steps: int
    verdict: str
    minutes: float


def run_of(line: Line) -> Run:
    """A line of the journal; a task that lost all its samples to a broken sandbox, before or after, is left out."""

    def change(side: str) -> Change:
        old, new = (
            {name: (row[0], row[1]) for name, row in line[side][when].items()} for when in ("before", "after")
        )
        known = sorted(old.keys() & new.keys())
        return Change({name: old[name] for name in known}, {name: new[name] for name in known})

    name = f"{line['kind']}-{line['seed']}"
    return Run(name, change("heldout"), change("trained"), line["steps"], line["verdict"], line["minutes"])


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
    ever = [ever_passed(counts) for counts in (together.before, together.after)]
    of = f"Of each task's {most_samples(together)} samples"
    lines += [f"{of} at least one passed in {ever[0]:.3f} of the tasks before and {ever[1]:.3f} after."]
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


def _rate(counts: Counts) -> float:
    return statistics.fmean(passed / samples for passed, samples in counts.values())


def ever_passed(counts: Counts) -> float:
    """Share of tasks of which at least one sample passed."""
    return statistics.fmean(passed > 0 for passed, _ in counts.values())


def most_samples(change: Change) -> int:
    """Samples of a task, of the one that has most."""
    return max(samples for _, samples in change.before.values())


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


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/generalise"), metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--control", type=int, nargs="*", default=[0], metavar="SEED")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--journal", type=Path, default=FOLDER / "journal.jsonl", metavar="FILE")
    parser.add_argument("--table", action="store_true", help="train nothing: read the journal")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Train what the journal lacks, then print the table."""
    args = _arguments(words)
    settings = {"seed": args.settings, "control": [*args.settings, *CONTROL]}
    marks = {kind: fingerprint(RECIPE, own) for kind, own in settings.items()}

    def mine() -> dict[tuple[str, int], Line]:
        lines = (line for line in read_jsonl(args.journal) if marks.get(line["kind"]) == line["settings"])
        return {(line["kind"], line["seed"]): line for line in lines}

    failed = []
    wanted = [("seed", seed) for seed in args.seeds] + [("control", seed) for seed in args.control]
    for kind, seed in wanted if not args.table else ():
        if (kind, seed) in mine():
            continue
        folder = args.out / f"{kind}-{seed}-{marks[kind][:8]}"
        if train(RECIPE, folder, seed, settings[kind]):
            add_line(args.journal, {"kind": kind, "seed": seed, "settings": marks[kind], **read_run(folder)})
        else:
            failed.append(f"{kind}-{seed}")
    there = mine()
    runs, controls = (
        [run_of(there[key]) for key in wanted if key[0] == kind and key in there] for kind in settings
    )
    print(table(runs, controls))
    if len({there[key]["tasks"] for key in wanted if key in there}) > 1:
        print("\n**The runs are of different sets of tasks: their rates cannot be compared.**")
    if failed:
        print(f"failed: {', '.join(failed)}; the same command goes on.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
