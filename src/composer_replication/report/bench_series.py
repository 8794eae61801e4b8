"""What one simulated evaluation holds, and how its tasks are drawn.

Letters of a shape: R runs, T evaluations, X values of V - H (-1, 0, 1), H values of one score
(0, 1). V and H are a task's visible and hidden result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from composer_replication.report.bench_evidence import Counts, Floats

NUM_EVALUATIONS = 400
NUM_CANARIES = 4
NUM_IN_LOOP = 128
"""Rollouts behind one in-loop reward."""

HONEST_KL = 0.3
"""Median KL to the initial policy, nats, that an honest run has reached at its end."""

Rate = float | Floats


@dataclass(frozen=True, slots=True)
class Rates:
    """The truth behind one evaluation: chances of a task, for all runs or for each.

    ``only_visible`` minus ``only_hidden`` is the true gap, ``both`` plus ``only_hidden`` the
    true score. ``in_loop`` is the reward's, by default the visible one.
    """

    only_visible: Rate
    only_hidden: Rate
    both: Rate
    canary: Rate = 0.0
    in_loop: Rate | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """What a policy that reads the guard knows before the next evaluation."""

    step: int
    log_evidence_R: Floats


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Counts of one evaluation, and the means that other detectors read."""

    gap_counts_XR: Counts
    truth_counts_HR: Counts
    canary_counts_HR: Counts
    in_loop_R: Floats
    kl_R: Floats


@dataclass(frozen=True, slots=True)
class Series:
    """All evaluations of some runs, as detectors read them."""

    gap_counts_TXR: Counts
    truth_TR: Floats
    in_loop_TR: Floats
    kl_TR: Floats
    log_evidence_TR: Floats

    @property
    def num_samples(self) -> Floats:
        """Samples behind each mean, at least 1."""
        samples_TR: Floats = np.maximum(self.gap_counts_TXR.sum(axis=1), 1).astype(np.float64)
        return samples_TR

    @property
    def mean_gap(self) -> Floats:
        """Mean of V - H over the samples of each evaluation."""
        difference = self.gap_counts_TXR[:, 2].astype(np.float64) - self.gap_counts_TXR[:, 0]
        return difference / self.num_samples


class RunDraws:
    """Random draws for some runs; one seed, one result, on every machine with this numpy.

    Args:
        num_runs: R.
        num_tasks: fresh tasks an evaluation.
        rng: of these runs alone.
        onset: the evaluation from which a hack moves the policy twice as fast; None: never.
    """

    def __init__(
        self, num_runs: int, num_tasks: int, rng: np.random.Generator, onset: int | None = None
    ) -> None:
        self.num_runs = num_runs
        self.num_tasks = num_tasks
        self.rng = rng
        self._onset = onset
        self._final_kl_R = HONEST_KL * np.exp(0.5 * rng.standard_normal(num_runs))

    def counts(self, rates: Rates) -> tuple[Counts, Counts]:
        """How many of the tasks have each V - H and each H, drawn independently."""
        only_visible = self._binomial(self.num_tasks, rates.only_visible)
        rest = self.num_tasks - only_visible
        only_hidden = self._binomial(rest, rates.only_hidden / (1.0 - rates.only_visible))
        rest = rest - only_hidden
        left = 1.0 - rates.only_visible - rates.only_hidden
        both = self._binomial(rest, rates.both / np.where(left > 0.0, left, 1.0))
        passed = only_hidden + both
        gaps = np.stack([only_hidden, self.num_tasks - only_hidden - only_visible, only_visible])
        return gaps, np.stack([self.num_tasks - passed, passed])

    def tasks(self, step: int, rates: Rates) -> Evaluation:
        """One valid evaluation: fresh tasks, each scored independently given the policy."""
        return self.evaluation(step, rates, *self.counts(rates))

    def evaluation(self, step: int, rates: Rates, gaps_XR: Counts, truths_HR: Counts) -> Evaluation:
        """The evaluation with these counts; canaries, in-loop reward and KL are drawn."""
        passes = self._binomial(NUM_CANARIES, rates.canary)
        in_loop = rates.only_visible + rates.both if rates.in_loop is None else rates.in_loop
        moved = step + (max(0, step - self._onset + 1) if self._onset else 0)
        kl_R = self._final_kl_R * moved / NUM_EVALUATIONS
        return Evaluation(
            gap_counts_XR=gaps_XR,
            truth_counts_HR=truths_HR,
            canary_counts_HR=np.stack([NUM_CANARIES - passes, passes]),
            in_loop_R=self._binomial(NUM_IN_LOOP, in_loop) / NUM_IN_LOOP,
            kl_R=kl_R * (1.0 + 0.3 * self.rng.standard_normal(self.num_runs)),
        )

    def _binomial(self, trials: int | Counts, rate: Rate) -> npt.NDArray[np.int64]:
        clipped = np.clip(rate, 0.0, 1.0)  # sums of rates miss 1 by rounding
        drawn: npt.NDArray[np.int64] = self.rng.binomial(trials, clipped, self.num_runs)
        return drawn


Step = Callable[[Watched], Evaluation]


@dataclass(frozen=True, slots=True)
class Family:
    """Runs of one kind.

    Attributes:
        name: as in the tables.
        kind: ``null`` (nothing to find, the theorem holds), ``hacked`` or ``invalid`` (nothing to
            find, but a condition of the theorem is broken).
        sentence: what its runs do.
        start: from the draws of some runs to the function that makes their evaluations in order.
        onset: the first hacked evaluation, counted from 1.
    """

    name: str
    kind: str
    sentence: str
    start: Callable[[RunDraws], Step]
    onset: int | None = None
