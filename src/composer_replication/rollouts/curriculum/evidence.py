"""What is known of one task: counts of attempts, in which older ones count less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from composer_replication.records import TaskOutcome
from composer_replication.rollouts.curriculum.beta_posterior import certainty_above, expected_spread

PRIOR = 0.5
"""Below all evidence lies Jeffreys' prior Beta(1/2, 1/2): most tasks are solved nearly always or nearly never.

Reference: Jeffreys, An invariant form for the prior probability in estimation problems, 1946.
"""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Counts of attempts at one task, each at least 0 and faded by age.

    ``passed`` and ``failed`` are full passes and all other graded attempts, recorded ones included. ``graded`` are
    those of this run alone, ``credit`` is the sum of their shares of passed tests. ``lost`` are attempts that
    infrastructure took, which say nothing of the pass rate.
    """

    passed: float = 0.0
    failed: float = 0.0
    graded: float = 0.0
    credit: float = 0.0
    lost: float = 0.0

    @property
    def a(self) -> float:
        """Of the posterior Beta(a, b)."""
        return PRIOR + self.passed

    @property
    def b(self) -> float:
        return PRIOR + self.failed

    @property
    def weight(self) -> float:
        """E[p (1 - p)]: how much a group of this task is expected to teach."""
        return expected_spread(self.a, self.b)

    @property
    def pass_rate(self) -> float | None:
        """Full passes per graded attempt; None where there was none."""
        total = self.passed + self.failed
        return self.passed / total if total > 0.0 else None

    @property
    def mean_credit(self) -> float | None:
        """Mean share of passed tests in this run; None where nothing was graded."""
        return self.credit / self.graded if self.graded > 0.0 else None

    def certainty_above(self, rate: float) -> float:
        """P(p > rate) under the posterior."""
        return certainty_above(rate, self.a, self.b)

    def faded(self, keep: float) -> Evidence:
        """Every count times ``keep``, in [0, 1]."""
        return Evidence(
            self.passed * keep,
            self.failed * keep,
            self.graded * keep,
            self.credit * keep,
            self.lost * keep,
        )

    def joined(self, outcomes: Sequence[TaskOutcome], *, forgives_lost: bool = False) -> Evidence:
        """With further attempts, whose order does not matter, bit for bit.

        ``forgives_lost`` leaves lost attempts uncounted.
        """
        graded = [outcome for outcome in outcomes if outcome.trouble != "infrastructure"]
        num_passed = sum(outcome.is_full_pass for outcome in graded)
        num_lost = 0 if forgives_lost else len(outcomes) - len(graded)
        return Evidence(
            self.passed + num_passed,
            self.failed + (len(graded) - num_passed),
            self.graded + len(graded),
            self.credit + math.fsum(outcome.credit for outcome in graded),
            self.lost + num_lost,
        )
