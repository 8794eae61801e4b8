"""The face that OpenEnv's servers drive: ``reset``, ``step``, ``state``, ``close``."""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata

from composer_replication import __version__
from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import StopReason
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.gym_face import GymFeatureDeletion
from composer_replication.rollouts.environment.openenv_types import (
    AttemptObservation,
    AttemptState,
    ToolAction,
)

_NUM_OPENINGS = 2


class OpenEnvFeatureDeletion(Environment[ToolAction, AttemptObservation, AttemptState]):
    """One attempt after the other, each in a sandbox of its own that ends with the attempt.

    Args:
        environment: driven by it alone.
        max_calls: after so many calls an attempt is graded as it stands; at least 1.

    Raises:
        UsageError: ``max_calls`` is below 1 (CR0800).
        NothingToDoError: the store holds no tasks (CR0604).
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, environment: FeatureDeletionEnv, *, max_calls: int = 100) -> None:
        super().__init__()
        self._environment = environment
        self._gym = GymFeatureDeletion(environment, max_calls=max_calls)
        self._task_ids = environment.grader.store.require_task_ids()
        self._state = AttemptState()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task_id: str | None = None,
        **unknown: Any,
    ) -> AttemptObservation:
        """Begin an attempt, and say what is to be done. Where no sandbox opens, it is over without a reward.

        Args:
            seed: draws the task where none is named; the same seed draws the same one of the same store.
            episode_id: whatever the client calls it.
            task_id: of the store.
            unknown: refused by name.

        Raises:
            UsageError: an argument that is not known, or of a wrong type (CR0854).
            InputError: the store has no such task (CR0412), or it is damaged.
        """
        _refuse_unknown(seed, episode_id, task_id, unknown)
        self._state = AttemptState(episode_id=episode_id)
        task_id = task_id or random.Random(seed).choice(self._task_ids)  # noqa: S311  no secret hangs on it
        for opening in range(1, _NUM_OPENINGS + 1):
            try:
                message, _ = self._gym.reset(task_id)
            except SandboxFailure as error:
                if opening == _NUM_OPENINGS:
                    return self._failed(f"{error.code}: {error.message}")
                continue
            break
        self._state = AttemptState(episode_id=episode_id, task_id=task_id, is_over=False)
        return AttemptObservation(text=message)

    def step(self, action: ToolAction, timeout_s: float | None = None, **unknown: Any) -> AttemptObservation:
        """Make one call; the last one is graded.

        Args:
            action: the call.
            timeout_s: not used: a policy that could say how long grading takes could have itself dropped.
            unknown: not used.

        Raises:
            UsageError: the attempt is over, or none was begun (CR0800).
        """
        del timeout_s, unknown
        result, reward, terminated, truncated, info = self._gym.step(action.to_call())
        failure = info.get("infrastructure_failure", "")
        reason = ""
        if terminated or truncated:
            reason = StopReason.SUBMITTED if terminated else StopReason.TURNS
            self._gym.close()  # whoever stays to look at the reward needs no sandbox
        if failure:
            reason = StopReason.INFRASTRUCTURE
        self._state.step_count, self._state.num_invalid = info["num_calls"], info["num_invalid"]
        self._state.is_over = terminated or truncated
        return AttemptObservation(
            text=result.text,
            is_error=result.is_error,
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            is_truncated=result.is_truncated,
            done=terminated or truncated,
            reward=reward,
            num_calls=info["num_calls"],
            num_invalid=info["num_invalid"],
            stop_reason=str(reason),
            infrastructure_failure=failure,
            metadata={"monitor": info["monitor"]} if "monitor" in info else {},
        )

    @property
    def state(self) -> AttemptState:
        return self._state

    @property
    def is_grading(self) -> bool:
        """Whether a call that has not come back is the last one, and its attempt is being graded."""
        try:
            return self._environment.is_done
        except UsageError:  # no attempt
            return False

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name="feature-deletion",
            description="A repository with a hole in it, tools to fill it, and a reward by its own tests.",
            version=__version__,
        )

    def close(self) -> None:
        """End the attempt and its sandbox; idempotent."""
        self._state.is_over = True
        self._gym.close()

    def _failed(self, why: str) -> AttemptObservation:
        return AttemptObservation(
            text="no sandbox could be opened",
            is_error=True,
            done=True,
            stop_reason=str(StopReason.INFRASTRUCTURE),
            infrastructure_failure=why,
        )


def _refuse_unknown(seed: object, episode_id: object, task_id: object, unknown: dict[str, Any]) -> None:
    wrong = [
        name
        for name, value, kind in (
            ("seed", seed, int),
            ("episode_id", episode_id, str),
            ("task_id", task_id, str),
        )
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool))
    ]
    problem = (
        f"{wrong[0]} is of a wrong type" if wrong else f"{min(unknown)!r} is not known" if unknown else ""
    )
    if problem:
        raise UsageError(
            "CR0854",
            f"this reset cannot be done: {problem[:100]}.",
            where="reset",
            fix="give it task_id (text), seed (an integer) or episode_id (text), or nothing.",
        )
