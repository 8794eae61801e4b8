"""Pass rates over fresh samples, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from composer_replication.tasks.difficulty import wilson


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What the samples of one task did; ``hidden`` is empty when the task has no hidden part.

    ``visible`` are the tests of the reward; ``shown`` and ``paid`` those of them that the policy can read and cannot, both
    empty when it can read all. ``hidden_share`` is the share of its hidden tests that each sample passed.
    """

    task_id: str
    visible: tuple[bool, ...]
    hidden: tuple[bool, ...]
    hidden_share: tuple[float, ...] = ()
    shown: tuple[bool, ...] = ()
    paid: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class PassRates:
    """Means over all samples; hidden rates and gap speak of tasks with a hidden part only, shown and paid rates of
    those with tests that are paid but not shown.
    """

    num_tasks: int
    num_samples: int
    visible_pass: float | None
    visible_ci95: tuple[float, float] | None
    hidden_pass: float | None
    hidden_ci95: tuple[float, float] | None
    gap: float | None
    pass_at_k: dict[str, float]
    infrastructure_failures: int
    shown_pass: float | None = None
    shown_ci95: tuple[float, float] | None = None
    paid_pass: float | None = None
    paid_ci95: tuple[float, float] | None = None


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased chance that one of k samples passes: 1 - C(n-c, k) / C(n, k).

    Reference: Chen et al., Evaluating large language models trained on code, 2021, eq. 1.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def summarise(results: Sequence[TaskResult], *, infrastructure_failures: int = 0) -> PassRates:
    """Pool the samples of all tasks; a rate without samples is None, never 0."""
    visible = [passed for result in results for passed in result.visible]
    with_hidden = [result for result in results if result.hidden]
    hidden = [passed for result in with_hidden for passed in result.hidden]
    shown = [passed for result in results for passed in result.shown]
    paid = [passed for result in results for passed in result.paid]
    visible_twins = [passed for result in with_hidden for passed in result.visible]
    fewest = min((len(result.visible) for result in results), default=0)
    return PassRates(
        num_tasks=len(results),
        num_samples=len(visible),
        visible_pass=_mean(visible),
        visible_ci95=_interval(visible),
        hidden_pass=_mean(hidden),
        hidden_ci95=_interval(hidden),
        gap=sum(visible_twins) / len(visible_twins) - sum(hidden) / len(hidden) if hidden else None,
        pass_at_k={
            str(k): sum(pass_at_k(len(r.visible), sum(r.visible), k) for r in results) / len(results)
            for k in (1, 2, 4, 8, 16)
            if k <= fewest
        },
        infrastructure_failures=infrastructure_failures,
        shown_pass=_mean(shown),
        shown_ci95=_interval(shown),
        paid_pass=_mean(paid),
        paid_ci95=_interval(paid),
    )


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _interval(values: Sequence[bool]) -> tuple[float, float] | None:
    return wilson(sum(values), len(values)) if values else None
