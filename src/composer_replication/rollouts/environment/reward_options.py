"""What an attempt is worth: a pure function of what the tests said, what it broke, and what it took.

    reward = share of the visible tests, by ``rule``
             - break_cost * share of PASS_TO_PASS that broke     (``breaks`` cost; with mask the share is 0 where any broke)
             - invalid_call_cost * number of calls that could not be made
             - effort.weight * C(x)                              (RECIPE section 1)

The costs are not clipped: an attempt may be worth less than nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from composer_replication.errors import UsageError
from composer_replication.records import Outcome, Score
from composer_replication.rollouts.monitor import MonitorReport
from composer_replication.rollouts.regressions import Regressions

RewardShape = Literal["fraction", "all_or_nothing", "weighted"]
BreakRule = Literal["mask", "cost", "ignore"]
_SHAPES = ("fraction", "all_or_nothing", "weighted")
_BREAKS = ("mask", "cost", "ignore")


@dataclass(frozen=True, slots=True)
class EffortPenalty:
    """A price on effort, ``weight * C(x)``, C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)).

    x is the sum of ``unit_weights[kind] * number``; kinds without a weight are free. The environment itself counts
    ``tool_call`` and ``turn``; who drives it may give token counts. The trainer has the same price over all kinds
    (``trainer.effort``): use one of the two.

    Args:
        weight: at least 0; 0 is no price.
        k: at least 0, in 1 / (unit of x). At 0 the cost is x.
        q: at least 0. At 1 it is ln(1 + k x) / k, above 1 it is bounded.
        unit_weights: at least 0, by kind.

    Reference: Composer 2 (2026, arXiv 2603.24477), as two summaries give it; k, q and weights are not published.

    Raises:
        UsageError: a number below 0 or not finite (CR0803).
    """

    weight: float
    k: float = 0.1
    q: float = 1.0
    unit_weights: Mapping[str, float] = field(default_factory=lambda: {"tool_call": 1.0})

    def __post_init__(self) -> None:
        _require_amounts({"weight": self.weight, "k": self.k, "q": self.q, **self.unit_weights}, "effort")

    def cost(self, counts: Mapping[str, float]) -> float:
        """The price of so much effort."""
        x = sum(self.unit_weights.get(kind, 0.0) * number for kind, number in counts.items())
        if x == 0.0 or self.k == 0.0:
            return self.weight * x
        grown = math.log1p(self.k * x)
        power = (1.0 - self.q) * grown
        ratio = math.expm1(power) / power if power != 0.0 else 1.0
        return self.weight * ratio * grown / self.k


@dataclass(frozen=True, slots=True)
class RewardOptions:
    """How a reward is made.

    Args:
        rule: ``fraction`` of the visible tests that pass; ``all_or_nothing``; ``weighted`` by ``weights``.
        weights: of tests by node id, or of test functions by node id without brackets (shared by its
            parametrisations); 1 for others. Only with ``weighted``.
        breaks: what it costs to break a test that passed before: ``mask`` pays nothing for the tests, ``cost`` takes
            ``break_cost`` times the share that broke, ``ignore`` does not run them. They are run once an attempt, and
            only where a visible test passes.
        break_cost: at least 0.
        break_sample: run so many of them, drawn for each attempt; 0 runs all.
        break_seed: of that draw, together with the task and the tree as it was left, so that a run can be repeated. It
            never enters a sandbox. None draws anew each time.
        invalid_call_cost: for each call that could not be made; at least 0. Such attempts are never left out of
            training: otherwise a policy learns to break its calls where it would lose.
        effort: a price on effort; None is none.

    Raises:
        UsageError: an unknown rule, or a number below 0 or not finite (CR0803).
    """

    rule: RewardShape = "fraction"
    weights: Mapping[str, float] = field(default_factory=dict)
    breaks: BreakRule = "mask"
    break_cost: float = 1.0
    break_sample: int = 0
    break_seed: int | None = None
    invalid_call_cost: float = 0.0
    effort: EffortPenalty | None = None

    def __post_init__(self) -> None:
        for name, known in (("rule", _SHAPES), ("breaks", _BREAKS)):
            if getattr(self, name) not in known:
                raise _unusable(f"{name} is {getattr(self, name)!r}", name, f"choose of {', '.join(known)}.")
        if self.weights and self.rule != "weighted":
            raise _unusable(f"weights are given and rule is {self.rule!r}", "rule", "say rule 'weighted'.")
        amounts = {
            "break_cost": self.break_cost,
            "break_sample": self.break_sample,
            "invalid_call_cost": self.invalid_call_cost,
        }
        _require_amounts({**amounts, **self.weights}, "reward")


def share_of_tests(score: Score, options: RewardOptions) -> float:
    """What the visible tests alone are worth, from 0 to 1.

    Raises:
        UsageError: every test that ran weighs 0 (CR0803).
    """
    if options.rule == "fraction":
        return score.pass_share
    if options.rule == "all_or_nothing":
        return float(score.all_passed)
    if score.error or not score.outcomes:
        return 0.0
    weights = {test: _weight(test, options.weights) for test in score.outcomes}
    total = sum(weights.values())
    if total == 0.0:
        raise _unusable(
            "every visible test of a task weighs 0", "weights", "give one of them a weight above 0."
        )
    return sum(weights[test] for test, outcome in score.outcomes.items() if outcome is Outcome.PASSED) / total


def reward_of(
    score: Score,
    options: RewardOptions,
    *,
    regressions: Regressions | None = None,
    num_invalid_calls: int = 0,
    effort_counts: Mapping[str, float] | None = None,
) -> float:
    """The reward of one attempt.

    Args:
        score: of the visible tests.
        options: how it is made.
        regressions: what it broke; None where nobody looked.
        num_invalid_calls: that could not be made.
        effort_counts: how much of each kind it took.

    Raises:
        UsageError: as ``share_of_tests``.
    """
    reward = share_of_tests(score, options)
    if regressions is not None and options.breaks == "mask" and regressions.broken:
        reward = 0.0
    if regressions is not None and options.breaks == "cost":
        reward -= options.break_cost * regressions.share
    reward -= options.invalid_call_cost * num_invalid_calls
    return reward - (options.effort.cost(effort_counts or {}) if options.effort is not None else 0.0)


def paid_reward(graded: float | None, report: MonitorReport | None) -> float | None:
    """What an attempt is paid: as it was graded, and 0 at most where the monitor flagged it; None stays None."""
    is_flagged = report is not None and report.masks_reward
    return min(0.0, graded) if graded is not None and is_flagged else graded


def _weight(test: str, weights: Mapping[str, float]) -> float:
    return weights.get(test, weights.get(test.partition("[")[0], 1.0))


def _require_amounts(amounts: Mapping[str, float], where: str) -> None:
    for name, amount in amounts.items():
        if not 0.0 <= amount < math.inf:
            raise _unusable(f"{name} is {amount}", f"{where}: {name}", "give a number from 0 up.")


def _unusable(what: str, where: str, fix: str) -> UsageError:
    return UsageError("CR0803", f"this reward cannot be made: {what}.", where=where, fix=fix)
