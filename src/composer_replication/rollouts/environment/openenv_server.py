"""OpenEnv: the face that its servers drive (``reset``, ``step``, ``state``, ``close``), and its own server over it.

A WebSocket (/ws) is a session with its sandbox. The library's ``POST /reset`` and ``/step`` make an environment for each
request, so that nothing can be done over several of them: they are left out (its mode ``production``).
"""

from __future__ import annotations

import functools
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import ConcurrencyConfig, EnvironmentMetadata

from composer_replication import __version__
from composer_replication.errors import ComposerError, SandboxFailure, UsageError
from composer_replication.records import MonitorMode, StopReason
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.openenv_client import (
    AttemptObservation,
    AttemptState,
    ToolAction,
)
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.tool_limits import ToolLimits
from composer_replication.sandbox import runs_interrupted

_NUM_OPENINGS = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MAX_MESSAGE_BYTES = 8 * 1024**2
_PING_SECONDS, _PONG_SECONDS = 20.0, 60.0  # a client whose machine has gone sends no farewell
_GRACEFUL_SECONDS = 5
_POLICY, _FORBIDDEN = 1008, 403
_LONGEST_CALL_SECONDS = ToolLimits().max_command_seconds
"""The library knows when it last answered, not that a call is under way."""
_RESET_ARGUMENTS = {"seed": int, "episode_id": str, "task_id": str}


class OpenEnvFeatureDeletion(Environment[ToolAction, AttemptObservation, AttemptState]):
    """One attempt after the other, each in a sandbox of its own that ends with the attempt.

    What ``reset`` and ``step`` refuse is a ``RuntimeError`` with code, sentence and next step: the library sends its text to
    the client, who is told no path of this machine. After ``close`` both refuse (CR0800): the library closes the environment
    of an idle session, but goes on to pass it what comes over its socket.

    Args:
        open_environment: makes the environment, driven by this alone.
        max_calls: after so many calls an attempt is graded as it stands; at least 1.
        counts: what came of attempts is added here.
        living: has this as long as it is not closed.
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
            unknown: refused by name, as is an argument of a wrong type (CR0722).
        """
        self._require_open("reset")
        try:
            _require_arguments({"seed": seed, "episode_id": episode_id, "task_id": task_id, **unknown})
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
            else:
                break
        self._state = AttemptState(episode_id=episode_id, task_id=task_id, is_over=False)
        if self._is_closed:  # meanwhile, by another thread: nobody else would take this sandbox away
            self._end()
            self._require_open("reset")
        return AttemptObservation(text=message)

    def step(self, action: ToolAction, timeout_s: float | None = None, **unknown: Any) -> AttemptObservation:
        """Make one call; the last one is graded.

        ``timeout_s`` is not used: a policy that could say how long grading takes could have itself dropped. What is refused
        with another code than CR0800 could not be done, and the attempt is over.
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
            self._grade(observation, StopReason.SUBMITTED if is_submitted else StopReason.TURNS)
        return observation

    def _grade(self, observation: AttemptObservation, reason: StopReason) -> None:
        """Fill in what the attempt came to, and end it: whoever stays to look at the reward needs no sandbox."""
        judgement = self._environment.finish()
        self._end()
        observation.done, observation.stop_reason = True, str(reason)
        self._counts["attempts"] += 1
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
    next_step = f" Next: {error.fix}" if error.fix else ""
    return RuntimeError(f"{error.code}: {error.message}{next_step}")


def _require_arguments(given: dict[str, Any]) -> None:
    for name, value in given.items():
        kind = _RESET_ARGUMENTS.get(name)
        if kind is None:
            problem = f"{name!r} is not known"
        elif value is not None and type(value) is not kind:
            problem = f"{name} is of a wrong type"
        else:
            continue
        raise UsageError(
            "CR0722",
            f"this reset cannot be done: {problem[:100]}.",
            where="reset",
            fix="give it task_id (text), seed (an integer) or episode_id (text), or nothing.",
        )


class EnvironmentServer:
    """Serves one store; ``serve`` blocks until a signal ends it.

    Args:
        grader: over the store; closed by whoever made it.
        max_sessions: clients at the same time; the library refuses the next one. Each may hold a sandbox.
        session_seconds: without a message, a session ends; so long after the last answer, and the longest call besides,
            since a call that is under way looks like silence to the library.
        max_calls: of one attempt; then it is graded as it stands.
        monitor: as ``FeatureDeletionEnv``.

    ``counts`` has ``attempts`` (ended ones), ``infrastructure_failures``, ``flagged`` (with a finding of the monitor) and
    ``masked`` (paid 0 at most for it).
    """

    def __init__(
        self,
        grader: Grader,
        *,
        max_sessions: int = 8,
        session_seconds: float = 600.0,
        max_calls: int = 100,
        monitor: MonitorMode = "mask",
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._open: set[OpenEnvFeatureDeletion] = set()
        grader.attempt_backend()  # its self-test is no client's time
        bounds = ConcurrencyConfig(
            max_concurrent_envs=max_sessions, session_timeout=session_seconds + _LONGEST_CALL_SECONDS
        )
        environment = functools.partial(
            OpenEnvFeatureDeletion,
            functools.partial(FeatureDeletionEnv, grader, monitor=monitor),
            max_calls=max_calls,
            counts=self.counts,
            living=self._open,
        )
        self.app = FastAPI(title="feature deletion")
        server = HTTPEnvServer(environment, ToolAction, AttemptObservation, concurrency_config=bounds)
        server.register_routes(self.app, mode="production")

    def serve(self, listener: socket) -> str:
        """Serve until a signal, and take everything away; the signal's name. ``listener`` listens already, and is closed here."""
        config = uvicorn.Config(
            self._without_pages,
            interface="asgi3",
            log_config=None,
            access_log=False,
            ws_max_size=_MAX_MESSAGE_BYTES,
            ws_ping_interval=_PING_SECONDS,
            ws_ping_timeout=_PONG_SECONDS,
            timeout_graceful_shutdown=_GRACEFUL_SECONDS,
        )
        web = _Server(config)
        before = {number: signal.signal(number, web.handle_exit) for number in _SIGNALS}
        try:
            web.run([listener])
        finally:
            for number, act in before.items():
                signal.signal(number, act)
            self.counts = self.counts.copy()  # what is interrupted now is lost: no attempt that ended
            with runs_interrupted():  # a call or a grading that is under way
                for environment in list(self._open):
                    environment.close()
        return signal.Signals(web.signals[0]).name if web.signals else ""

    async def _without_pages(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, for whoever sends no Origin: a page in somebody's browser does, and no client of ours."""
        is_page = any(name == b"origin" for name, _ in scope.get("headers", ()))
        if is_page and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY})
        elif is_page:  # POST /mcp takes a place, too
            await send({"type": "http.response.start", "status": _FORBIDDEN, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await self.app(scope, receive, send)


class _Server(uvicorn.Server):
    """Keeps which signals came; whoever runs it says what they mean to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.signals: list[int] = []

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.signals.append(sig)
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
