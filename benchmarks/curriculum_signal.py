"""How many groups have a signal, when tasks come in data order, from the curriculum, and from one who knows?

    python benchmarks/curriculum_signal.py [--tasks 400] [--groups 16] [--generations 300] [--seeds 3]

A simulated pool: task i has a difficulty d_i, drawn from a normal distribution, and at generation t the policy passes
it with p = 1 / (1 + exp(d_i - s_t)), where the skill s_t grows evenly from 0 to 4 logits. It is the same for all
ways of drawing, so that they are compared on equal terms. A group has a signal when some of its attempts pass and
some fail. ``uniform`` goes through shuffled epochs, ``recorded`` is the curriculum after 8 recorded attempts at each
task by the first policy, ``oracle`` draws by the true p (1 - p) of the moment.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from composer_replication.channel_tables import CurriculumSection
from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum import Curriculum, Evidence
from composer_replication.rollouts.curriculum.chooser import draw_without_repeats

NUM_RECORDED = 8
POOLS = {
    "wide": (2.0, 4.0),
    "mostly too hard": (5.0, 3.0),
    "mostly solved": (-2.0, 3.0),
    "hardly different": (2.0, 1.0),
}
"""Mean and standard deviation of the difficulties, in logits."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Simulated tasks and a policy that gets better."""

    num_tasks: int
    num_groups: int
    group_size: int
    num_generations: int
    mean_difficulty: float
    spread: float
    seed: int
    last_skill: float = 4.0

    def difficulties(self) -> dict[str, float]:
        """By task id, in logits."""
        chance = random.Random(f"pool/{self.seed}")
        return {f"t{n:05}": chance.gauss(self.mean_difficulty, self.spread) for n in range(self.num_tasks)}

    def pass_rates(self, generation: int) -> dict[str, float]:
        """By task id, of the policy at that generation."""
        skill = self.last_skill * generation / max(self.num_generations - 1, 1)
        return {i: 1.0 / (1.0 + math.exp(d - skill)) for i, d in self.difficulties().items()}


class Way(Protocol):
    """A way of drawing; ``rates`` are the true pass rates of the moment."""

    def draw(self, rates: Mapping[str, float]) -> list[str]: ...

    def learn(self, task_id: str, passes: list[bool]) -> None: ...


class Uniform:
    """Shuffled epochs, as TRL's sampler makes them."""

    def __init__(self, pool: Pool) -> None:
        self.num_groups = pool.num_groups
        self.chance = random.Random(f"uniform/{pool.seed}")
        self.left: list[str] = []

    def draw(self, rates: Mapping[str, float]) -> list[str]:
        if len(self.left) < self.num_groups:
            self.left = list(rates)
            self.chance.shuffle(self.left)
        taken, self.left = self.left[: self.num_groups], self.left[self.num_groups :]
        return taken

    def learn(self, task_id: str, passes: list[bool]) -> None:
        """It does not."""


class FromCurriculum:
    """The real one, fed with full passes alone."""

    def __init__(self, pool: Pool, options: CurriculumSection, *, num_recorded: int = 0) -> None:
        chance, recorded = random.Random(f"recorded/{pool.seed}"), {}
        for task_id, rate in pool.pass_rates(0).items():
            num_passed = sum(chance.random() < rate for _ in range(num_recorded))
            recorded[task_id] = Evidence(float(num_passed), float(num_recorded - num_passed))
        rows = [{"task_id": task_id} for task_id in recorded]
        self.num_groups = pool.num_groups
        self.chooser = Curriculum(rows, seed=pool.seed, options=options, recorded=recorded)

    def draw(self, rates: Mapping[str, float]) -> list[str]:
        del rates
        return [str(row["task_id"]) for row in self.chooser.chosen_rows(self.num_groups)]

    def learn(self, task_id: str, passes: list[bool]) -> None:
        self.chooser.learn([TaskOutcome(task_id, passed, float(passed)) for passed in passes])


class Oracle:
    """By the true p (1 - p)."""

    def __init__(self, pool: Pool) -> None:
        self.num_groups = pool.num_groups
        self.chance = random.Random(f"oracle/{pool.seed}")

    def draw(self, rates: Mapping[str, float]) -> list[str]:
        weights = {task_id: p * (1.0 - p) for task_id, p in rates.items()}
        return draw_without_repeats(weights, self.num_groups, self.chance)

    def learn(self, task_id: str, passes: list[bool]) -> None:
        """It knows."""


def signal_share(pool: Pool, way: Way) -> float:
    """Share of groups, over the whole run, in which some attempts pass and some fail."""
    chance, num_mixed = random.Random(f"attempts/{pool.seed}"), 0
    for generation in range(pool.num_generations):
        rates = pool.pass_rates(generation)
        for task_id in way.draw(rates):
            passes = [chance.random() < rates[task_id] for _ in range(pool.group_size)]
            num_mixed += 0 < sum(passes) < len(passes)
            way.learn(task_id, passes)
    return num_mixed / (pool.num_generations * pool.num_groups)


def shares(pool: Pool, options: CurriculumSection) -> dict[str, float]:
    """By way of drawing."""
    ways: dict[str, Way] = {
        "uniform": Uniform(pool),
        "curriculum": FromCurriculum(pool, options),
        "recorded": FromCurriculum(pool, options, num_recorded=NUM_RECORDED),
        "oracle": Oracle(pool),
    }
    return {name: signal_share(pool, way) for name, way in ways.items()}


def main() -> None:
    """One table, a row a pool, means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--generations", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--half-life", type=float, default=CurriculumSection().half_life)
    args = parser.parse_args()
    options = CurriculumSection(half_life=args.half_life)
    print(
        f"{args.tasks} tasks, {args.groups} groups of {args.group_size}, {args.generations} generations, "
        f"half-life {args.half_life:g}, {args.seeds} seeds: share of groups with signal\n"
    )
    print("| pool | uniform | curriculum | recorded | oracle |\n|---|---|---|---|---|")
    for name, (mean, spread) in POOLS.items():
        sizes = (args.tasks, args.groups, args.group_size, args.generations)
        found = [shares(Pool(*sizes, mean, spread, seed), options) for seed in range(args.seeds)]
        print(
            f"| {name} | "
            + " | ".join(f"{statistics.fmean(r[w] for r in found):.3f}" for w in found[0])
            + " |"
        )


if __name__ == "__main__":
    main()
