"""How much effort a rollout took, of the counts that a rollout function gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.trainer.policy_options import EFFORT_UNITS

COLUMN = "effort_counts"
"""Under this name a rollout function returns one mapping of kind to number for each row."""


def effort_units(counts: Mapping[str, Any]) -> float:
    """``x``, the counts times ``EFFORT_UNITS``; kinds that are not given count 0.

    Raises:
        UsageError: an unknown kind, or a number below 0 or not finite (CR0777).
    """
    for kind, number in counts.items():
        if kind not in EFFORT_UNITS or not 0 <= float(number) < float("inf"):
            raise UsageError(
                "CR0777",
                f"effort_counts has {kind} = {number!r}; it needs numbers from 0 of {', '.join(EFFORT_UNITS)}.",
                where="the rollout function's effort_counts",
                fix="return one mapping of these kinds to numbers for each rollout.",
            )
    return sum(EFFORT_UNITS[kind] * float(number) for kind, number in counts.items())
