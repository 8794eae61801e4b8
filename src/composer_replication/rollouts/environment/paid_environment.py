"""What the faces ask of an environment, over what an agent loop asks: its counts, and what an attempt is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from composer_replication.interfaces import AgentEnvironment
from composer_replication.rollouts.tools.toolbox import CallCounts


class PaidEnvironment(AgentEnvironment, Protocol):
    """An environment that counts calls and pays attempts; ours are ``FeatureDeletionEnv`` and ``RayEnvironment``.

    ``reward`` ends the attempt; None where a sandbox failed.
    """

    @property
    def counts(self) -> CallCounts: ...

    def reward(self, effort_counts: Mapping[str, float] | None = None) -> float | None: ...
