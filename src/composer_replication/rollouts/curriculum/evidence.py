"""What is known of one task: counts of attempts, in which older ones count less, and what they say of its pass rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_replication.channel_tables import CurriculumSection
from composer_replication.records import TaskOutcome
from composer_replication.tasks.difficulty import FOLDER, read_difficulty

PRIOR = 0.5
"""Below all evidence lies Jeffreys' prior Beta(1/2, 1/2): most tasks are solved nearly always or nearly never.

Reference: Jeffreys, An invariant form for the prior probability in estimation problems, 1946.
"""
_MAX_TERMS = 10_000
_PRECISION = 1e-14
_TINY = 1e-300


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


def has_recorded_evidence(store_root: Path, options: CurriculumSection) -> bool:
    """Whether there is anything to read, so that nobody hashes a model for nothing."""
    wants = options.recorded != "none" and options.recorded_weight > 0.0
    return wants and (Path(store_root) / FOLDER).is_dir()


def recorded_evidence(
    store_root: Path, options: CurriculumSection, *, parameter_sha256: str
) -> dict[str, Evidence]:
    """By task id, the recorded passes and failures, scaled down to ``options.recorded_weight`` attempts in all.

    Counts of the very weights (``parameter_sha256``) win; without any, those of all other policies are added up where
    ``options.recorded`` is ``any``. A task without a measurement is left out.

    Raises:
        InputError: a file of measurements cannot be read (CR0456).
    """
    if not has_recorded_evidence(store_root, options):
        return {}
    found: dict[str, Evidence] = {}
    for task_id, rows in read_difficulty(store_root).items():
        same = [row for row in rows if row.policy.parameter_sha256 == parameter_sha256]
        used = same or (rows if options.recorded == "any" else ())
        num_samples = sum(row.num_samples for row in used)
        num_passed = sum(row.num_passed for row in used)
        if num_samples:
            scale = min(1.0, options.recorded_weight / num_samples)
            found[task_id] = Evidence(num_passed * scale, (num_samples - num_passed) * scale)
    return found


def expected_spread(a: float, b: float) -> float:
    """E[p (1 - p)] = a b / ((a + b)(a + b + 1)) for p ~ Beta(a, b): at most 1/4.

    p (1 - p) is the variance of one attempt. With few counts it stays near the 1/8 of Beta(1/2, 1/2), so a task that was
    hardly tried keeps its chance.
    """
    total = a + b
    return a * b / (total * (total + 1.0))


def certainty_above(rate: float, a: float, b: float) -> float:
    """P(p > rate) for p ~ Beta(a, b), with an absolute error below 1e-10 for a and b up to 10,000.

    I_x(a, b) = x^a (1 - x)^b / (a B(a, b)) / (1 + d1/(1 + d2/(1 + ...))), and P(p > rate) = I_{1 - rate}(b, a).
    Reference: DLMF 8.17.22, evaluated by Lentz's method (Thompson and Barnett, 1986).
    """
    if rate <= 0.0 or rate >= 1.0:
        return float(rate <= 0.0)
    if rate > a / (a + b):  # here the fraction converges fast; on the other side its complement does
        return _lower_tail(1.0 - rate, b, a)
    return 1.0 - _lower_tail(rate, a, b)


def _lower_tail(x: float, a: float, b: float) -> float:
    log_front = (
        a * math.log(x)
        + b * math.log1p(-x)
        + math.lgamma(a + b)
        - math.lgamma(a)
        - math.lgamma(b)
        - math.log(a)
    )
    return math.exp(log_front) / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + ...))."""
    value, upper, lower = 1.0, 1.0, 0.0
    for n in range(1, _MAX_TERMS):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1.0 / _not_zero(1.0 + d * lower)
        upper = _not_zero(1.0 + d / upper)
        value *= upper * lower
        if abs(upper * lower - 1.0) < _PRECISION:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
