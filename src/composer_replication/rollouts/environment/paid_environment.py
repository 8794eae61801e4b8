"""What the faces ask of an environment, over what an agent loop asks: its counts, and what an attempt is worth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from composer_replication.interfaces import AgentEnvironment
from composer_replication.rollouts.regressions import Regressions
from composer_replication.rollouts.tools.toolbox import CallCounts


class PaidEnvironment(AgentEnvironment, Protocol):
    """An environment that counts calls and pays attempts; ours are ``FeatureDeletionEnv`` and ``RayEnvironment``.

    ``reward`` ends the attempt; None where a sandbox failed.
    """

    @property
    def counts(self) -> CallCounts: ...

    def reward(self, effort_counts: Mapping[str, float] | None = None) -> float | None: ...


class InspectedEnvironment(PaidEnvironment, Protocol):
    """One whose tree can be looked at, and judged; ours are the same two.

    ``regressions`` and ``tree_root`` are those of the attempt. Files are None where a sandbox failed.

    Raises (``all_files`` and ``candidate``):
        TreeTooLargeError: more than is graded.
    """

    @property
    def regressions(self) -> Regressions | None: ...

    @property
    def tree_root(self) -> str: ...

    def all_files(self) -> dict[str, bytes] | None: ...

    def candidate(self) -> dict[str, bytes] | None: ...
