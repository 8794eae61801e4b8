"""What faces and judgements ask of an environment, over what an agent loop asks."""

from __future__ import annotations

from typing import Protocol

from composer_replication.interfaces import AgentEnvironment
from composer_replication.rollouts.monitor import MonitorReport
from composer_replication.rollouts.regressions import Regressions
from composer_replication.rollouts.tools.toolbox import CallCounts


class PaidEnvironment(AgentEnvironment, Protocol):
    """An environment that counts calls and pays attempts; ours are ``FeatureDeletionEnv`` and ``RayEnvironment``.

    ``reward`` ends the attempt; None where a sandbox failed. ``graded_reward`` is then what it is worth whatever it did,
    ``report`` what the monitor says (None where it is off), ``regressions`` what it broke. ``candidate`` is its tree as it is
    graded, None where a sandbox failed.

    Raises (``candidate``):
        TreeTooLargeError: more than is graded.
    """

    @property
    def counts(self) -> CallCounts: ...

    @property
    def report(self) -> MonitorReport | None: ...

    @property
    def graded_reward(self) -> float | None: ...

    @property
    def regressions(self) -> Regressions | None: ...

    def reward(self) -> float | None: ...

    def candidate(self) -> dict[str, bytes] | None: ...
