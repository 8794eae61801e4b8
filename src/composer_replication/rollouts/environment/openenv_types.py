"""What travels between an OpenEnv client and our server: one call, what it gave, and where the attempt stands."""

from __future__ import annotations

import json
from typing import Any

from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

from composer_replication.records import ToolCall


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
    is_truncated: bool = False
    num_calls: int = 0
    num_invalid: int = 0
    stop_reason: str = ""
    infrastructure_failure: str = ""


class AttemptState(State):
    """Which task is attempted and how far; ``step_count`` counts calls. ``is_over`` before a reset and after the end."""

    task_id: str = ""
    num_invalid: int = 0
    is_over: bool = True
