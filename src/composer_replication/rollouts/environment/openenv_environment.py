"""The face that OpenEnv's servers drive: ``reset``, ``step``, ``state``, ``close``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata

from composer_replication import __version__
from composer_replication.errors import ComposerError, SandboxFailure, UsageError
from composer_replication.records import StopReason
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.openenv_client import (
    AttemptObservation,
    AttemptState,
    ToolAction,
)

_NUM_OPENINGS = 2


class OpenEnvFeatureDeletion(Environment[ToolAction, AttemptObservation, AttemptState]):
    """One attempt after the other, each in a sandbox of its own that ends with the attempt.

    What ``reset`` and ``step`` refuse is a ``RuntimeError`` with code, sentence and next step: the library sends its text to
    the client, who is told no path of this machine. After ``close`` both refuse: the library closes the environment of an
    idle session, but goes on to pass it what comes over its socket.

    Args:
        open_environment: makes the environment, driven by this alone.
        max_calls: after so many calls an attempt is graded as it stands; at least 1.
        counts: what came of attempts is added here.
        living: has this as long as it is not closed.

    Raises:
        NothingToDoError: the store holds no tasks (CR0604).
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self,
        open_environment: Callable[[], FeatureDeletionEnv],
        *,
        max_calls: int = 100,
        counts: Counter[str] | None = None,
        living: set[OpenEnvFeatureDeletion] | None = None,
    ) -> None:
        super().__init__()
        self._environment = open_environment()
        self._max_calls = max_calls
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._living = set() if living is None else living
        self._task_ids = self._environment.grader.store.require_task_ids()
        self._is_closed = False
        self._state = AttemptState()
        self._living.add(self)

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
            RuntimeError: an argument that is not known, or of a wrong type (CR0722); the store has no such task
                (CR0412), or it is damaged; the session has ended (CR0800).
        """
        self._require_open("reset")
        try:
            _refuse_unknown(seed, episode_id, task_id, unknown)
            return self._reset(task_id or random.Random(seed).choice(self._task_ids), episode_id)  # noqa: S311  no secret hangs on it
        except ComposerError as error:
            raise _told(error) from error

    def _reset(self, task_id: str, episode_id: str | None) -> AttemptObservation:
        self._state = AttemptState(episode_id=episode_id)
        for opening in range(1, _NUM_OPENINGS + 1):
            try:
                message = self._environment.reset(task_id)
            except SandboxFailure as error:
                if opening == _NUM_OPENINGS:
                    return self._lost("no sandbox could be opened", error)
                continue
            break
        self._state = AttemptState(episode_id=episode_id, task_id=task_id, is_over=False)
        if self._is_closed:  # meanwhile, by another thread: nobody else would take this sandbox away
            self._end()
            self._require_open("reset")
        return AttemptObservation(text=message)

    def step(self, action: ToolAction, timeout_s: float | None = None, **unknown: Any) -> AttemptObservation:
        """Make one call; the last one is graded.

        Args:
            action: the call.
            timeout_s: not used: a policy that could say how long grading takes could have itself dropped.
            unknown: not used.

        Raises:
            RuntimeError: the attempt is over, none was begun, or the session has ended (CR0800). Any other code: the call
                or its grading could not be done, and the attempt is over.
        """
        del timeout_s, unknown
        self._require_open("step")
        if self._state.is_over:
            problem = "the attempt is over, or none was begun."
            raise _told(UsageError("CR0800", problem, where="step", fix="reset first."))
        try:
            return self._step(action)
        except SandboxFailure as error:
            return self._lost("the sandbox broke", error)
        except ComposerError as error:
            self._end()
            raise _told(error) from error

    def _step(self, action: ToolAction) -> AttemptObservation:
        environment = self._environment
        result = environment.call(action.to_call())
        counts, is_submitted = environment.counts, environment.is_done
        self._state.step_count, self._state.num_invalid = counts.num_calls, counts.num_invalid
        observation = AttemptObservation(
            text=result.text,
            is_error=result.is_error,
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            is_truncated=result.is_truncated,
            reward=0.0,
            num_calls=counts.num_calls,
            num_invalid=counts.num_invalid,
        )
        if is_submitted or counts.num_calls >= self._max_calls:
            self._grade(observation)
            if not observation.infrastructure_failure:
                observation.stop_reason = str(StopReason.SUBMITTED if is_submitted else StopReason.TURNS)
        return observation

    def _grade(self, observation: AttemptObservation) -> None:
        """Fill in what the attempt came to, and end it: whoever stays to look at the reward needs no sandbox."""
        judgement = self._environment.finish()
        self._end()
        observation.done, self._counts["attempts"] = True, self._counts["attempts"] + 1
        if judgement is None:
            self._counts["infrastructure_failures"] += 1
            observation.reward, observation.infrastructure_failure = None, "the grading failed"
            observation.stop_reason = str(StopReason.INFRASTRUCTURE)
            return
        observation.reward = judgement.reward
        if judgement.report is not None:
            observation.metadata = {"monitor": judgement.report.to_json()}
            self._counts["flagged"] += bool(judgement.report.findings)
            self._counts["masked"] += judgement.masks_reward

    @property
    def state(self) -> AttemptState:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name="feature-deletion",
            description="A repository with a hole in it, tools to fill it, and a reward by its own tests.",
            version=__version__,
        )

    def close(self) -> None:
        """End the attempt and its sandbox, and begin none any more; idempotent."""
        self._is_closed = True
        self._end()
        self._living.discard(self)

    def _require_open(self, where: str) -> None:
        if self._is_closed:
            problem = "this session has ended: nothing came for too long, or the server ends."
            raise _told(UsageError("CR0800", problem, where=where, fix="connect anew."))

    def _end(self) -> None:
        self._state.is_over = True
        self._environment.close()

    def _lost(self, text: str, error: SandboxFailure) -> AttemptObservation:
        """The end of an attempt whose sandbox failed."""
        self._end()
        self._counts.update(attempts=1, infrastructure_failures=1)
        return AttemptObservation(
            text=text,
            is_error=True,
            done=True,
            num_calls=self._state.step_count,
            num_invalid=self._state.num_invalid,
            stop_reason=str(StopReason.INFRASTRUCTURE),
            infrastructure_failure=f"{error.code}: {error.message}",
        )


def _told(error: ComposerError) -> RuntimeError:
    """Places are left out: they are paths of the server's machine."""
    return RuntimeError(
        f"{error.code}: {error.message} Next: {error.fix}" if error.fix else f"{error.code}: {error.message}"
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
            "CR0722",
            f"this reset cannot be done: {problem[:100]}.",
            where="reset",
            fix="give it task_id (text), seed (an integer) or episode_id (text), or nothing.",
        )
