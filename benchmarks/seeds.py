"""Studies of several seeds: the arms of one recipe, trained by ``composer-rl train`` and compared in tables.

``generalise`` (claim): a policy trained on some repositories solves more tasks of repositories that it never saw, and one with
shuffled rewards does not. Target: 1.5 times the base's held-out pass rate, intervals apart; a missed target is a result, not a failure.
``ablation`` (no claim): what do hints and preferences between siblings each add to GRPO on the small model?

    python benchmarks/seeds.py generalise                              # what the journal lacks of seeds 0, 1, 2, then the tables
    python benchmarks/seeds.py ablation --only right-hints --seeds 1   # one run
    python benchmarks/seeds.py ablation --table                        # what the journal holds

A finished run is one line of ``recipes/STUDY/journal.jsonl``: commit it, and the seeds may be spread over days and machines. A run that was
cut off goes on from its folder under ``--out``, where that is still there. Lines of other settings (another recipe, other ``--set``) stay in the
journal and are left out of the tables. Intervals are 95%: of a run Wilson's over samples, of an arm Student's t over seeds and, for
the seeds together, a bootstrap over tasks, because samples of one task are alike. Exit code 1 where a run failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from composer_replication.config import parse_override, read_table
from composer_replication.run_folder import read_json, read_jsonl, rewrite_jsonl
from composer_replication.tasks.difficulty import wilson

RECIPES = Path(__file__).parents[1] / "recipes"
COMMAND = Path(sys.executable).with_name("composer-rl")
HALTED = 5  # the guard stopped it; its rates were measured all the same
STUDIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "generalise": {"seed": (), "control": ("reward.is_shuffled=true",)},
    "ablation": {
        "grpo": (),
        "right-hints": ("trainer.alpha_sdpo=0.5",),
        "siblings": ("trainer.beta_replay=0.1", "replay.sibling_pairs=true"),
    },
}
"""The arms of each study, and what each sets over the recipe. The first is the one that the others are compared with."""
ONE_SEED = ("control",)  # of these arms the first seed alone is asked for
MEASURES = ("held-out before", "held-out after", "trained before", "trained after", "reward of all steps")
FIGURES = {
    "sdpo/turns": "hinted turns a step",
    "sdpo/divergence": "divergence from the teacher, nats a token",
    "sdpo/importance_weight": "importance weight",
    "replay/pairs": "pairs a step",
    "replay/accuracy": "share of pairs in order",
    "replay/reward_margin": "margin",
}
GOAL = 1.5
STUDENT = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
"""t with P(-t < T < t) = 0.95 for Student's T with 1 to 9 degrees of freedom, one less than there are seeds; of more seeds the last."""
NUM_RESAMPLES = 4000
DASH = "\N{EN DASH}"

Line = Mapping[str, Any]
Counts = Mapping[str, tuple[int, int]]
"""Passed and samples by task."""


def fingerprint(recipe: Path, settings: Sequence[str]) -> str:
    """Of a recipe as it is written, and what is set over it; the seed aside."""
    table = {key: value for key, value in read_table(recipe).items() if key != "seed"}
    text = json.dumps([table, dict(parse_override(setting) for setting in settings)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_run(folder: Path) -> dict[str, Any]:
    """What a finished run folder says: passed and samples by task, means over steps, verdict, and on what it was run."""
    summary, environment = read_json(folder / "summary.json"), read_json(folder / "environment.json")
    steps = read_jsonl(folder / "metrics.jsonl")
    known = {name: [row[name] for row in steps if row.get(name) is not None] for name in ("reward", *FIGURES)}

    def counts(side: str, tests: str) -> dict[str, dict[str, list[int]]]:
        return {
            when: {name: [row[tests], row["samples"]] for name, row in summary[when][side]["by_task"].items()}
            for when in ("before", "after")
        }

    return {
        "heldout": counts("heldout", "hidden"),
        "trained": counts("train", "visible"),
        "steps": summary["steps"],
        "verdict": summary["verdict"],
        "minutes": round(summary["seconds"] / 60, 1),
        "parameter_sha256": summary["parameter_sha256"],
        "tasks": environment["tasks_fingerprint"],
        "revision": environment["git_revision"],
        **{name: statistics.fmean(values) for name, values in known.items() if values},
    }


def train(recipe: Path, folder: Path, seed: int, settings: Sequence[str]) -> bool:
    """One run to its end, from where it was cut off; whether there is something to read."""
    if (folder / "summary.json").is_file():
        return True
    flags = [part for setting in (f"seed={seed}", *settings) for part in ("--set", setting)]
    resume = ["--resume"] if (folder / "run.toml").is_file() else []
    command = [str(COMMAND), "train", str(recipe), "--out", str(folder), *flags, *resume]
    return subprocess.run(command, check=False).returncode in (0, HALTED)


def arm_of(line: Line) -> str:
    """Lines of the study ``generalise`` call it ``kind``."""
    return str(line.get("arm", line.get("kind")))


def over_seeds(values: Sequence[float]) -> tuple[float, float] | None:
    """95% for the mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    half = STUDENT[min(len(values), 10) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def bootstrap(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95% of the mean of all values, when whole groups are drawn again."""
    chance = random.Random(0)
    drawn = (chain.from_iterable(chance.choices(groups, k=len(groups))) for _ in range(NUM_RESAMPLES))
    means = sorted(map(statistics.fmean, drawn))
    return means[int(0.025 * NUM_RESAMPLES)], means[int(0.975 * NUM_RESAMPLES) - 1]


def mean_rate(counts: Counts) -> float:
    """Mean over tasks of the share of samples that passed."""
    return statistics.fmean(passed / samples for passed, samples in counts.values())


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

    @classmethod
    def of(cls, line: Line, side: str) -> Change:
        """From a line; a task that lost all its samples to a broken sandbox, before or after, is left out."""
        old, new = (
            {name: (row[0], row[1]) for name, row in line[side][when].items()} for when in ("before", "after")
        )
        names = sorted(old.keys() & new.keys())
        return cls({name: old[name] for name in names}, {name: new[name] for name in names})

    def rates(self) -> tuple[float, float]:
        """Mean over tasks, before and after."""
        return mean_rate(self.before), mean_rate(self.after)

    def intervals(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """95% over fresh samples on these tasks."""
        return mean_interval([*self.before.values()]), mean_interval([*self.after.values()])

    def cells(self) -> list[str]:
        """Rate and interval, before and after."""
        return [_cell(*pair) for pair in zip(self.rates(), self.intervals(), strict=True)]

    def is_apart(self) -> bool:
        """Whether the interval after training lies above the one before."""
        old, new = self.intervals()
        return old[1] < new[0]

    def meets_goal(self) -> bool:
        """Half again the base's rate, with intervals apart."""
        old, new = self.rates()
        return new >= GOAL * old and self.is_apart()

    def over_tasks(self) -> tuple[float, float]:
        """95% bootstrap interval of the mean difference: tasks are drawn anew, each with all its samples."""
        old, new = (
            {name: mean_rate({name: row}) for name, row in side.items()} for side in (self.before, self.after)
        )
        return bootstrap([[new[name] - old[name]] for name in sorted(old)])


def pooled(changes: Sequence[Change]) -> Change:
    """The runs' samples of each task together; only tasks that every run has."""
    names = sorted(set.intersection(*(set(change.before) for change in changes)))

    def together(rows: Sequence[Counts]) -> Counts:
        return {name: (sum(r[name][0] for r in rows), sum(r[name][1] for r in rows)) for name in names}

    return Change(together([c.before for c in changes]), together([c.after for c in changes]))


ByArm = Mapping[str, Mapping[int, Line]]


def tables(by_arm: ByArm) -> str:
    """Markdown: each run, each arm, differences to the first arm, figures of channels, and the first arm by repository."""
    lines = [line for of_arm in by_arm.values() for line in of_arm.values()]
    parts = [_runs(lines), _arms(by_arm), _differences(by_arm)]
    if any(name in line for line in lines for name in FIGURES):
        parts.append(_figures(by_arm))
    parts += [_together(arm, [*of_arm.values()]) for arm, of_arm in by_arm.items() if of_arm]
    first = [*next(iter(by_arm.values())).values()]
    if first:
        parts.append(_repositories(pooled([Change.of(line, "heldout") for line in first])))
    if len({line["tasks"] for line in lines}) > 1:
        parts.append("**The runs are of different sets of tasks: their rates cannot be compared.**")
    return "\n\n".join(parts)


def _runs(lines: Iterable[Line]) -> str:
    rows = [["run", "steps", "guard", "held-out, before", "after", "times", "apart", "trained, before", "after", "minutes"]]  # fmt: skip
    for line in lines:
        heldout, trained = Change.of(line, "heldout"), Change.of(line, "trained")
        old, new = heldout.rates()
        times = [f"{new / old:.2f}" if old else DASH, "yes" if heldout.is_apart() else "no"]
        run = [f"{arm_of(line)}-{line['seed']}", str(line["steps"]), line["verdict"]]
        rows.append([*run, *heldout.cells(), *times, *trained.cells(), f"{line['minutes']:.0f}"])
    return markdown(rows)


def _measures(line: Line) -> dict[str, float]:
    rates = [*Change.of(line, "heldout").rates(), *Change.of(line, "trained").rates()]
    rewards = [line["reward"]] if "reward" in line else []
    return dict(zip(MEASURES, [*rates, *rewards], strict=False))


def mean_cell(values: Sequence[float], sign: str = "") -> str:
    """The mean over seeds with its interval."""
    return _cell(statistics.fmean(values), over_seeds(values), sign) if values else DASH


def _arms(by_arm: ByArm) -> str:
    rows = [["arm", "seeds", *MEASURES, "minutes a run"]]
    for arm, lines in by_arm.items():
        found = [_measures(line) for line in lines.values()]
        cells = [mean_cell([each[name] for each in found if name in each]) for name in MEASURES]
        minutes = f"{statistics.fmean(line['minutes'] for line in lines.values()):.1f}" if lines else DASH
        rows.append([arm, str(len(lines)), *cells, minutes])
    return markdown(rows)


def _differences(by_arm: ByArm) -> str:
    """By the seeds that an arm and the first one both have."""
    first, *others = by_arm
    names = [name for name in MEASURES if "before" not in name]
    rows = [["difference", "seeds", *names]]
    for arm in others:
        seeds = sorted(by_arm[arm].keys() & by_arm[first].keys())
        pairs = [(_measures(by_arm[arm][seed]), _measures(by_arm[first][seed])) for seed in seeds]
        less = [[own[n] - base[n] for own, base in pairs if n in own and n in base] for n in names]
        cells = [mean_cell(each, "+") for each in less]
        rows.append([f"{arm} less {first}", str(len(seeds)), *cells])
    return markdown(rows)


def _figures(by_arm: ByArm) -> str:
    rows = [["mean over steps", *by_arm]]
    for name, words in FIGURES.items():
        found = ([line[name] for line in lines.values() if name in line] for lines in by_arm.values())
        rows.append([words, *map(mean_cell, found)])
    return markdown(rows)


def _together(arm: str, lines: Sequence[Line]) -> str:
    """What the seeds of an arm say together of held-out tasks."""
    runs = [Change.of(line, "heldout") for line in lines]
    change = pooled(runs)
    old, new = change.cells()
    low, high = change.over_tasks()
    most = max(samples for _, samples in change.before.values())
    both = (change.before, change.after)
    ever = [statistics.fmean(passed > 0 for passed, _ in side.values()) for side in both]
    return (
        f"{arm}, all seeds: {old} before, {new} after. Difference over tasks: {low:+.3f} to {high:+.3f}. "
        f"Of each task's {most} samples at least one passed in {ever[0]:.3f} of the tasks before and {ever[1]:.3f} after. "
        f"{GOAL:g} times, intervals apart: {'met' if change.meets_goal() else 'missed'} together, "
        f"met by {sum(run.meets_goal() for run in runs)} of {len(runs)} alone."
    )


def _repositories(change: Change) -> str:
    """A task's id begins with the repository's name and version."""
    rows = [["held-out repository", "tasks", "before", "after"]]
    for repository in sorted({name.partition("--")[0] for name in change.before}):
        names = [name for name in change.before if name.partition("--")[0] == repository]
        old, new = (mean_rate({name: side[name] for name in names}) for side in (change.before, change.after))
        rows.append([repository, str(len(names)), f"{old:.3f}", f"{new:.3f}"])
    return markdown(rows)


def _cell(mean: float, ends: tuple[float, float] | None, sign: str = "") -> str:
    return f"{mean:{sign}.3f}" + ("" if ends is None else f" ({ends[0]:{sign}.3f} to {ends[1]:{sign}.3f})")


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *body])


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=[*STUDIES])
    parser.add_argument("--only", nargs="+", metavar="ARM", help="these arms alone are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="train nothing: read the journal")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/STUDY")
    parser.add_argument("--recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--journal", type=Path, metavar="FILE")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args(words)
    if unknown := {*(args.only or ())} - STUDIES[args.study].keys():
        known = ", ".join(STUDIES[args.study])
        parser.error(f"{args.study} has no arm {', '.join(sorted(unknown))}: {known}")
    args.out = args.out or Path("runs") / args.study
    args.recipe = args.recipe or RECIPES / args.study / "run.toml"
    args.journal = args.journal or RECIPES / args.study / "journal.jsonl"
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Train what the journal lacks, a seed in all arms before the next, then print the tables."""
    args = _arguments(words)
    settings = {arm: [*args.settings, *own] for arm, own in STUDIES[args.study].items()}
    marks = {arm: fingerprint(args.recipe, own) for arm, own in settings.items()}

    def mine() -> dict[str, dict[int, Line]]:
        """By arm and seed; the first line of a seed counts."""
        found: dict[str, dict[int, Line]] = {arm: {} for arm in marks}
        for line in read_jsonl(args.journal):
            if marks.get(arm_of(line)) == line["settings"]:
                found[arm_of(line)].setdefault(line["seed"], line)
        return found

    failed = []
    for number, seed in enumerate(() if args.table else args.seeds):
        for arm in args.only or settings:
            if seed in mine()[arm] or (arm in ONE_SEED and number and not args.only):
                continue
            folder = args.out / f"{arm}-{seed}-{marks[arm][:8]}"
            if train(args.recipe, folder, seed, settings[arm]):
                line = {"arm": arm, "seed": seed, "settings": marks[arm], **read_run(folder)}
                # whole: a torn line swallows no other
                rewrite_jsonl(args.journal, [*read_jsonl(args.journal), line])
            else:
                failed.append(f"{arm} {seed}")
    there = mine()
    print(tables(there))
    num_others = len(read_jsonl(args.journal)) - sum(map(len, there.values()))
    if num_others:
        print(f"\n{num_others} lines of other settings, or of a seed that has one, are left out.")
    if failed:
        print(f"failed: {', '.join(failed)}; the same command goes on.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
