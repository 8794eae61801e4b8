"""``reset`` and ``step``, as Gymnasium has them, with tool calls as actions and their results as observations."""

from __future__ import annotations

from typing import Any

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import ToolCall, ToolResult
from composer_replication.rollouts.environment.paid_environment import PaidEnvironment


class GymFeatureDeletion:
    """One environment behind ``reset`` and ``step``.

    Args:
        environment: driven by it alone.
        max_calls: after so many calls an attempt is truncated, and graded as it stands; at least 1.

    Raises:
        UsageError: ``max_calls`` is below 1 (CR0800).
    """

    def __init__(self, environment: PaidEnvironment, *, max_calls: int = 100) -> None:
        if max_calls < 1:
            raise _misused(f"max_calls is {max_calls}.", "give a number from 1 up.")
        self._environment = environment
        self._max_calls = max_calls
        self._is_over = True

    def reset(self, task_id: str) -> tuple[str, dict[str, Any]]:
        """Begin an attempt: the first message, and what is known besides.

        Raises:
            InputError, SandboxFailure: as ``FeatureDeletionEnv.reset``.
        """
        self._is_over = True
        message = self._environment.reset(task_id)
        self._is_over = False
        return message, {"task_id": task_id, "tools": self._environment.tools}

    def step(self, call: ToolCall) -> tuple[ToolResult, float | None, bool, bool, dict[str, Any]]:
        """Make one call: result, reward, terminated, truncated, info.

        The reward is 0 until the end, and None where a sandbox failed: such an attempt is dropped, not scored. ``info`` has ``num_calls`` and ``num_invalid``, ``infrastructure_failure`` where there was one,
        and at the end, where a monitor looks, ``monitor``: its report, with ``findings`` and ``masks_reward``.

        Raises:
            UsageError: the attempt is over, or none was begun (CR0800).
        """
        if self._is_over:
            raise _misused("the attempt is over, or none was begun.", "call reset(task_id) first.")
        environment = self._environment
        try:
            result = environment.call(call)
        except SandboxFailure as error:
            self._is_over = True
            info = self._info() | {"infrastructure_failure": str(error)}
            return ToolResult("the sandbox broke", is_error=True), None, True, False, info
        terminated = environment.is_done
        truncated = not terminated and environment.counts.num_calls >= self._max_calls
        if not (terminated or truncated):
            return result, 0.0, False, False, self._info()
        self._is_over = True
        reward = environment.reward()
        info, report = self._info(), environment.report
        if report is not None:
            info["monitor"] = report.to_json()
        if reward is None:
            info["infrastructure_failure"] = "the grading failed"
        return result, reward, terminated, truncated, info

    def close(self) -> None:
        """End the attempt; idempotent."""
        self._is_over = True
        self._environment.close()

    def _info(self) -> dict[str, Any]:
        counts = self._environment.counts
        return {"num_calls": counts.num_calls, "num_invalid": counts.num_invalid}


def _misused(message: str, fix: str) -> UsageError:
    return UsageError(
        "CR0800", f"the environment cannot be stepped: {message}", where="GymFeatureDeletion", fix=fix
    )
