"""What travels between an OpenEnv client and our server (one call, what it gave, where the attempt stands), and the client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient
from pydantic import Field

from composer_replication.records import ToolCall

_GRADING_SECONDS = 900.0


class ToolAction(Action):
    """One tool call.

    ``arguments`` is an object, or the policy's own text, JSON or not: what cannot be read is an invalid call, which is
    answered and counted, and no error of the connection.
    """

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)

    def to_call(self) -> ToolCall:
        text = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)
        return ToolCall(self.name, text)


class AttemptObservation(Observation):
    """What a call gave, or the task after a reset; ``done`` and ``reward`` are OpenEnv's own.

    ``reward`` is 0 until the end, and null after a reset and where a sandbox failed: that attempt alone is to be dropped,
    and ``infrastructure_failure`` says why it failed. An attempt that the monitor masks is paid the smaller of 0 and what
    it was graded, and stays in the loss like any other. ``metadata`` of the last observation has the report of the
    ``monitor``: its ``findings``, and ``masks_reward``. ``exit_code`` is that of a
    command. ``stop_reason`` is empty until the end: submitted, turns (``max_calls`` were made), infrastructure.
    """

    text: str
    is_error: bool = False
    exit_code: int | None = None
    timed_out: bool = False
    stop_reason: str = ""
    infrastructure_failure: str = ""


class AttemptState(State):
    """Which task is attempted and how far; ``step_count`` counts calls. ``is_over`` before a reset and after the end."""

    task_id: str = ""
    num_invalid: int = 0
    is_over: bool = True


class FeatureDeletionClient(GenericEnvClient):
    """One session: ``reset(task_id=..., seed=...)``, ``step(ToolAction(...))``, ``state()``, ``close()``.

    Args:
        base_url: of the server, as ``serve-env`` prints it.
        options: of ``EnvClient``. ``message_timeout_s``, how long to wait for an answer, is 900 by default, because the last
            call of an attempt is answered when it is graded, and giving up ends the session.

    What the server refuses is a ``RuntimeError`` with its reason and code.
    """

    def __init__(self, base_url: str | None = None, **options: Any) -> None:
        super().__init__(base_url, **{"message_timeout_s": _GRADING_SECONDS, **options})

    def _parse_result(self, payload: Mapping[str, Any]) -> StepResult[AttemptObservation]:
        outcome = {"reward": payload["reward"], "done": payload["done"]}
        return StepResult(AttemptObservation(**payload["observation"], **outcome), **outcome)

    def _parse_state(self, payload: Mapping[str, Any]) -> AttemptState:
        return AttemptState(**payload)
