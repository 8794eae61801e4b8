"""The client of our server, for whoever trains elsewhere: typed actions and observations over OpenEnv's own client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient

from composer_replication.rollouts.environment.openenv_types import (
    AttemptObservation,
    AttemptState,
    ToolAction,
)

_GRADING_SECONDS = 900.0


class FeatureDeletionClient(EnvClient[ToolAction, AttemptObservation, AttemptState]):
    """One session: ``reset(task_id=..., seed=...)``, ``step(ToolAction(...))``, ``state()``, ``close()``.

    Args:
        base_url: of the server, as ``serve-env`` prints it.
        message_timeout_s: how long to wait for an answer; the default is long because the last call of an
            attempt is answered when it is graded, and giving up ends the session.
        options: of ``EnvClient``.

    Raises (when used):
        ConnectionError: nobody listens there.
        RuntimeError: the server refused, with its reason and code.
    """

    def __init__(
        self, base_url: str | None = None, *, message_timeout_s: float = _GRADING_SECONDS, **options: Any
    ) -> None:
        super().__init__(base_url, message_timeout_s=message_timeout_s, **options)

    def _step_payload(self, action: ToolAction) -> dict[str, Any]:
        payload: dict[str, Any] = action.model_dump()
        return payload

    def _parse_result(self, payload: Mapping[str, Any]) -> StepResult[AttemptObservation]:
        observation = AttemptObservation(
            **payload["observation"], reward=payload["reward"], done=payload["done"]
        )
        return StepResult(observation, reward=observation.reward, done=observation.done)

    def _parse_state(self, payload: Mapping[str, Any]) -> AttemptState:
        return AttemptState(**payload)
