"""What the faces ask of an environment, over what an agent loop asks: its counts, and what an attempt is worth."""

from __future__ import annotations

from typing import Protocol

from composer_replication.interfaces import AgentEnvironment
from composer_replication.rollouts.monitor import MonitorReport
from composer_replication.rollouts.regressions import Regressions
from composer_replication.rollouts.tools.toolbox import CallCounts


class PaidEnvironment(AgentEnvironment, Protocol):
    """An environment that counts calls and pays attempts; ours are ``FeatureDeletionEnv`` and ``RayEnvironment``.

    ``reward`` ends the attempt; None where a sandbox failed. ``graded_reward`` is then what it is worth whatever it did, and
    ``report`` what the monitor says, None where it is off.
    """

    @property
    def counts(self) -> CallCounts: ...

    @property
    def report(self) -> MonitorReport | None: ...

    @property
    def graded_reward(self) -> float | None: ...

    def reward(self) -> float | None: ...


class InspectedEnvironment(PaidEnvironment, Protocol):
    """One that says what an attempt broke, and hands out its tree; ours are the same two.

    ``candidate`` is None where a sandbox failed.

    Raises (``candidate``):
        TreeTooLargeError: more than is graded.
    """

    @property
    def regressions(self) -> Regressions | None: ...

    def candidate(self) -> dict[str, bytes] | None: ...
