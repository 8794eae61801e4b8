"""What an attempt is worth: a function of what the tests said, what it broke, and how it called.

    reward = share of the visible tests, by ``rule``
             - share of PASS_TO_PASS that broke                  (``breaks`` cost; with mask the share is 0 where any broke)
             - invalid_call_cost * number of calls that could not be made

The costs are not clipped: an attempt may be worth less than nothing. The price of effort is the trainer's (``trainer.effort``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_replication.config import AgentRewardSection
from composer_replication.records import Score
from composer_replication.rollouts.monitor.hack_monitor import MonitorReport
from composer_replication.rollouts.regressions import Regressions
from composer_replication.rollouts.tools.tool_context import CallCounts


class RewardOptions(AgentRewardSection):
    """How a reward is made: the table ``[agent.reward]``, and ``break_seed``.

    ``break_seed``, with the task and the tree as it was left, draws the ``break_sample`` tests, so that a run can be repeated; it
    never enters a sandbox. None draws anew each time.
    """

    break_seed: int | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one attempt is worth, and why."""

    score: Score  # of the visible tests
    reward: float  # what it is paid: graded_reward, and 0 at most where the monitor flagged it
    graded_reward: float
    regressions: Regressions | None = None  # what it broke; None: nobody looked
    report: MonitorReport | None = None  # None: the monitor is off
    counts: CallCounts = field(default_factory=CallCounts)
    hidden: Score | None = None  # of the hidden tests, where they were asked for: for evaluation only
    tree: Mapping[str, bytes] | None = None  # the files as graded, where they are to be graded again
    patch: str | None = None  # the diff from the broken code to them, for a person
    tree_sha256: str = ""  # of them (swebench_files); empty where they are too large to be graded

    @property
    def masks_reward(self) -> bool:
        return self.report is not None and self.report.masks_reward

    @property
    def figures(self) -> dict[str, float]:
        """Numbers for a log, by name; those that are not known are left out."""
        found: dict[str, float] = {
            "num_calls": self.counts.num_calls,
            "num_invalid_calls": self.counts.num_invalid,
            "num_broken_tests": len(self.regressions.broken) if self.regressions is not None else 0,
            "visible_pass_share": self.score.pass_share,
        }
        if self.report is not None:
            found |= {"num_findings": len(self.report.findings), "is_masked": self.masks_reward}
        if self.hidden is not None:
            found["hidden_pass_share"] = self.hidden.pass_share
        return {name: float(value) for name, value in found.items()}


def reward_of(
    score: Score,
    options: RewardOptions,
    *,
    regressions: Regressions | None = None,
    num_invalid_calls: int = 0,
) -> float:
    """The reward of one attempt whose visible tests said ``score``; without ``regressions`` nobody looked what it broke."""
    reward = score.pass_share if options.rule == "fraction" else float(score.all_passed)
    if regressions is not None and options.breaks == "mask" and regressions.broken:
        reward = 0.0
    if regressions is not None and options.breaks == "cost":
        reward -= regressions.share
    return reward - options.invalid_call_cost * num_invalid_calls
