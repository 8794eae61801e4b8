"""OpenEnv: the face that its servers drive (``reset``, ``step``, ``state``, ``close``), and its own server over it.

A WebSocket (/ws) is a session with its sandbox. The library's ``POST /reset`` and ``/step`` make an environment for each
request, so that nothing can be done over several of them: they are left out (its mode ``production``). Its ``create_app`` is
not used: it is ``create_fastapi_app``, but that a variable ENABLE_WEB_INTERFACE has it open ``POST /web/reset`` and
``/web/step``, over one attempt that all visitors share and that no limit of sessions or seconds ends.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from socket import socket
from typing import Any

import uvicorn
from fastapi import Response
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import ConcurrencyConfig

from composer_replication.errors import ComposerError, SandboxFailure, UsageError
from composer_replication.records import MonitorMode, StopReason
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv, begin
from composer_replication.rollouts.environment.openenv_client import (
    AttemptObservation,
    AttemptState,
    ToolAction,
)
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.toolbox import MAX_COMMAND_SECONDS
from composer_replication.sandbox import runs_interrupted

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OF_A_RESULT = ("text", "is_error", "exit_code", "timed_out")
_OPEN: set[OpenEnvFeatureDeletion] = set()
"""Those of this process that are not closed."""


@contextmanager
def _told() -> Iterator[None]:
    """What is refused, as the library tells it to the client; places are left out: they are paths of the server's machine."""
    try:
        yield
    except ComposerError as error:
        next_step = f" Next: {error.fix}" if error.fix else ""
        raise RuntimeError(f"{error.code}: {error.message}{next_step}") from error


class OpenEnvFeatureDeletion(Environment[ToolAction, AttemptObservation, AttemptState]):
    """One attempt after the other, each in a sandbox of its own that ends with the attempt.

    What ``reset`` and ``step`` refuse is a ``RuntimeError`` with code, sentence and next step: the library sends its text to
    the client. After ``close`` both refuse (CR0800): the library closes the environment of an idle session, but goes on to
    pass it what comes over its socket.

    Args:
        open_environment: makes the environment, driven by this alone.
        max_calls: after so many calls an attempt is graded as it stands; at least 1.
        counts: what came of attempts is added here.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self, open_environment: Callable[[], FeatureDeletionEnv], max_calls: int, counts: Counter[str]
    ) -> None:
        super().__init__()
        self._environment = open_environment()
        self._max_calls, self._counts = max_calls, counts
        self._task_ids = self._environment.grader.store.require_task_ids()
        self._is_closed = False
        self._state = AttemptState()
        _OPEN.add(self)

    @property
    def state(self) -> AttemptState:
        return self._state

    @_told()
    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task_id: str | None = None,
        **unknown: Any,
    ) -> AttemptObservation:
        """Begin an attempt, and say what is to be done. Where no sandbox opens, it is over without a reward.

        Takes ``task_id``, or a ``seed`` that draws one (the same seed draws the same one of the same store), and an
        ``episode_id``, which is whatever the client calls it. Anything else is refused by name (CR0722).
        """
        self._require_open("reset")
        given = {"seed": (seed, int), "episode_id": (episode_id, str), "task_id": (task_id, str)}
        wrong = [
            name for name, (value, kind) in given.items() if value is not None and type(value) is not kind
        ]
        if wrong := [*unknown, *wrong]:
            raise UsageError(
                "CR0722",
                f"this reset cannot be done: {wrong[0][:100]!r} is not known or of a wrong type.",
                where="reset",
                fix="give it task_id (text), seed (an integer) or episode_id (text), or nothing.",
            )
        task_id = task_id or random.Random(seed).choice(self._task_ids)  # noqa: S311  no secret hangs on it
        self._state = AttemptState(episode_id=episode_id)
        try:
            message = begin(self._environment, task_id)
        except SandboxFailure as error:
            return self._lost("no sandbox could be opened", f"{error.code}: {error.message}")
        self._state = AttemptState(episode_id=episode_id, task_id=task_id, is_over=False)
        if self._is_closed:  # meanwhile, by another thread: nobody else would take this sandbox away
            self._end()
            self._require_open("reset")
        return AttemptObservation(text=message)

    @_told()
    def step(self, action: ToolAction, timeout_s: float | None = None, **unknown: Any) -> AttemptObservation:
        """Make one call; the last one is graded.

        ``timeout_s`` is not used: a policy that could say how long grading takes could have itself dropped. What is refused
        with another code than CR0800 could not be done, and the attempt is over.
        """
        del timeout_s, unknown
        self._require_open("step")
        if self._state.is_over:
            raise UsageError(
                "CR0800", "the attempt is over, or none was begun.", where="step", fix="reset first."
            )
        try:
            result = self._environment.call(action.to_call())
            is_submitted = self._environment.is_done
            self._state.step_count, self._state.num_invalid = self._environment.counts
            told: dict[str, Any] = {name: getattr(result, name) for name in _OF_A_RESULT}
            observation = AttemptObservation(**told, reward=0.0)
            if not is_submitted and self._state.step_count < self._max_calls:
                return observation
            judgement = self._environment.finish()
        except SandboxFailure as error:
            return self._lost("the sandbox broke", f"{error.code}: {error.message}")
        except ComposerError:
            self._end()
            raise
        self._end()  # whoever stays to look at the reward needs no sandbox
        if judgement is None:
            return self._lost(observation.text, "the grading failed")
        self._counts["attempts"] += 1
        observation.done, observation.reward = True, judgement.reward
        observation.stop_reason = str(StopReason.SUBMITTED if is_submitted else StopReason.TURNS)
        if judgement.report is not None:
            observation.metadata = {"monitor": judgement.report.to_json()}
            self._counts["flagged"] += bool(judgement.report.findings)
            self._counts["masked"] += judgement.masks_reward
        return observation

    def _lost(self, text: str, failure: str) -> AttemptObservation:
        """The end of an attempt whose sandbox failed."""
        self._end()
        self._counts.update(attempts=1, infrastructure_failures=1)
        stop_reason = str(StopReason.INFRASTRUCTURE)
        return AttemptObservation(
            text=text, is_error=True, done=True, stop_reason=stop_reason, infrastructure_failure=failure
        )

    def close(self) -> None:
        """End the attempt and its sandbox, and begin none any more; idempotent."""
        self._is_closed = True
        self._end()
        _OPEN.discard(self)

    def _end(self) -> None:
        self._state.is_over = True
        self._environment.close()

    def _require_open(self, where: str) -> None:
        if self._is_closed:
            problem = "this session has ended: nothing came for too long, or the server ends."
            raise UsageError("CR0800", problem, where=where, fix="connect anew.")


def serve(
    listener: socket,
    grader: Grader,
    *,
    max_sessions: int,
    session_seconds: float,
    max_calls: int,
    monitor: MonitorMode,
    on_ready: Callable[[], None],
) -> tuple[str, Counter[str]]:
    """Serve the store of a grader until a signal, and take everything away: the signal's name, and what came of attempts.

    ``listener`` listens already, and is closed here; ``on_ready`` is called as soon as a signal would be heeded. More than
    ``max_sessions`` clients at a time, each of which may hold a sandbox, are refused by the library. A session without a
    message ends ``session_seconds`` and the longest call after the last answer, since the library takes a call that is under
    way for silence. After ``max_calls`` an attempt is graded as it stands.

    The counts are ``attempts`` (ended ones), ``infrastructure_failures``, ``flagged`` (with a finding of the monitor) and
    ``masked`` (paid 0 at most for it).
    """
    counts: Counter[str] = Counter()
    environment = partial(FeatureDeletionEnv, grader, monitor=monitor)
    app = create_fastapi_app(
        partial(OpenEnvFeatureDeletion, environment, max_calls, counts),
        ToolAction,
        AttemptObservation,
        concurrency_config=ConcurrencyConfig(
            max_concurrent_envs=max_sessions, session_timeout=session_seconds + MAX_COMMAND_SECONDS
        ),
        mode="production",
    )
    config = uvicorn.Config(
        partial(_without_pages, app),
        interface="asgi3",
        log_config=None,
        access_log=False,
        ws_max_size=8 * 1024**2,
        ws_ping_timeout=60.0,  # pinged every 20 s: a client whose machine has gone sends no farewell
        timeout_graceful_shutdown=5,
    )
    web, signals = uvicorn.Server(config), list[int]()

    def note(number: int, frame: Any) -> None:
        """Uvicorn raises every signal again when it has ended, the first one last."""
        signals.append(number)
        web.handle_exit(number, frame)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        on_ready()
        web.run([listener])
    finally:
        for number, act in before.items():
            signal.signal(number, act)
        ended = counts.copy()  # an attempt that is interrupted from here on is lost, and not counted
        with runs_interrupted():  # a call or a grading that is under way
            for each in list(_OPEN):
                each.close()
    return signal.Signals(signals[-1]).name if signals else "", ended


async def _without_pages(app: Any, scope: Any, receive: Any, send: Any) -> None:
    """The application, for whoever sends no Origin: a page in somebody's browser does, and no client of ours."""
    if not any(name == b"origin" for name, _ in scope.get("headers", ())):
        await app(scope, receive, send)
    elif scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:  # POST /mcp takes a place, too
        await Response(status_code=403)(scope, receive, send)
