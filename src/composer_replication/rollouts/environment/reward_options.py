"""What an attempt is worth: a pure function of what the tests said, what it broke, and how it called.

    reward = share of the visible tests, by ``rule``
             - share of PASS_TO_PASS that broke                  (``breaks`` cost; with mask the share is 0 where any broke)
             - invalid_call_cost * number of calls that could not be made

The costs are not clipped: an attempt may be worth less than nothing. The price of effort is the trainer's (``trainer.effort``).
"""

from __future__ import annotations

from collections.abc import Mapping

from composer_replication.channel_tables import AgentRewardSection
from composer_replication.errors import UsageError
from composer_replication.records import Outcome, Score
from composer_replication.rollouts.monitor import MonitorReport
from composer_replication.rollouts.regressions import Regressions


class RewardOptions(AgentRewardSection):
    """How a reward is made: the table ``[agent.reward]``, and ``break_seed``.

    ``break_seed`` is of the draw of ``break_sample`` tests, together with the task and the tree as it was left, so that a
    run can be repeated. It never enters a sandbox. None draws anew each time.
    """

    break_seed: int | None = None


def share_of_tests(score: Score, options: RewardOptions) -> float:
    """What the visible tests alone are worth, from 0 to 1.

    Raises:
        UsageError: every test that ran weighs 0 (CR0204).
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
        raise UsageError(
            "CR0204",
            "this reward cannot be made: every visible test of a task weighs 0.",
            where="weights",
            fix="give one of them a weight above 0.",
        )
    return sum(weights[test] for test, outcome in score.outcomes.items() if outcome is Outcome.PASSED) / total


def reward_of(
    score: Score,
    options: RewardOptions,
    *,
    regressions: Regressions | None = None,
    num_invalid_calls: int = 0,
) -> float:
    """The reward of one attempt.

    Args:
        score: of the visible tests.
        options: how it is made.
        regressions: what it broke; None where nobody looked.
        num_invalid_calls: that could not be made.

    Raises:
        UsageError: as ``share_of_tests``.
    """
    reward = share_of_tests(score, options)
    if regressions is not None and options.breaks == "mask" and regressions.broken:
        reward = 0.0
    if regressions is not None and options.breaks == "cost":
        reward -= regressions.share
    return reward - options.invalid_call_cost * num_invalid_calls


def paid_reward(graded: float | None, report: MonitorReport | None) -> float | None:
    """What an attempt is paid: as it was graded, and 0 at most where the monitor flagged it; None stays None."""
    is_flagged = report is not None and report.masks_reward
    return min(0.0, graded) if graded is not None and is_flagged else graded


def _weight(test: str, weights: Mapping[str, float]) -> float:
    return weights.get(test, weights.get(test.partition("[")[0], 1.0))
