"""What a finding of each class does: one frozen record, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from composer_replication.errors import UsageError
from composer_replication.records import MonitorMode
from composer_replication.rollouts.monitor.hack_classes import HACK_CLASSES, Action


@dataclass(frozen=True, slots=True)
class MonitorOptions:
    """Options of the hack monitor.

    Args:
        actions: by class, ``mask`` (the rollout is taken out of the loss), ``report`` (counted and stored only) or
            ``off`` (not looked for). Classes that are not named keep the default of ``HACK_CLASSES``.
        max_findings: most findings of one class in one episode; the first ones are kept, since one is
            enough to act on and a hostile episode could make thousands. 5 show a pattern.

    Raises:
        UsageError: a class or an action that does not exist (CR0830), or a number below 1 (CR0830).
    """

    actions: Mapping[str, Action] = field(default_factory=dict)
    max_findings: int = 5

    def __post_init__(self) -> None:
        for name, action in self.actions.items():
            if name not in HACK_CLASSES:
                raise UsageError(
                    "CR0830",
                    f"there is no hack class {name!r}.",
                    where="monitor.actions",
                    fix=f"take one of {', '.join(HACK_CLASSES)}.",
                )
            if action not in get_args(Action):
                raise UsageError(
                    "CR0830",
                    f"{action!r} is not what a finding can do.",
                    where=f"monitor.actions.{name}",
                    fix=f"take one of {', '.join(get_args(Action))}.",
                )
        if self.max_findings < 1:
            raise UsageError(
                "CR0830",
                f"max_findings is {self.max_findings}, which keeps no finding.",
                where="monitor.max_findings",
                fix="give a number from 1, or switch classes off.",
            )

    def action_of(self, name: str) -> Action:
        """What a finding of that class does."""
        return self.actions.get(name, HACK_CLASSES[name].action)


def options_for(mode: MonitorMode) -> MonitorOptions:
    """``mask`` is the default of each class; ``report`` looks for the same and masks nothing; ``off`` looks for nothing.

    Raises:
        UsageError: no such mode (CR0830).
    """
    return MonitorOptions() if mode == "mask" else MonitorOptions(dict.fromkeys(HACK_CLASSES, mode))
