"""One client's session: its calls one after the other in threads, and its end, whoever ends it.

The library's own sessions look at the socket between calls only, so that a client that dies during a call keeps its
sandbox for as long as the call takes; its reaper takes the environment away from under an open socket; and its clean-up
can be cancelled while it waits for a lock, which keeps the place taken for ever. So the sessions are ours, and
messages, models and client are the library's.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

from openenv.core.env_server.types import WSErrorCode
from starlette.websockets import WebSocket, WebSocketDisconnect

from composer_replication.errors import ComposerError, MissingError, UsageError
from composer_replication.rollouts.environment.openenv_environment import OpenEnvFeatureDeletion
from composer_replication.rollouts.environment.openenv_messages import (
    Asked,
    CloseAsked,
    NotUnderstood,
    ResetAsked,
    StateAsked,
    StepAsked,
    error_frame,
    observation_frame,
    read_frame,
    state_frame,
)
from composer_replication.rollouts.environment.openenv_types import AttemptObservation
from composer_replication.sandbox import interruptible_by

_MAX_WAITING = 4
"""Frames that a client may send before it has its answers; OpenEnv's clients send one."""
_SEND_SECONDS = 30.0
_GRACE_SECONDS = 60.0
"""On top of the longest tool: the sandbox's own work, and a machine that is busy."""
_NORMAL, _AWAY, _POLICY = 1000, 1001, 1008
T = TypeVar("T")


class SessionOverError(Exception):
    """The session ends; ``error`` is what its client is told, None where there is nobody to tell.

    Args:
        error: the sentence.
        close_code: of the WebSocket.
    """

    def __init__(self, error: ComposerError | None, close_code: int = _NORMAL) -> None:
        super().__init__(error)
        self.error = error
        self.close_code = close_code


class Session:
    """Answers one accepted WebSocket until it is over. On one event loop; blocking work is done in ``threads``.

    Args:
        websocket: accepted.
        environment: this session's own.
        threads: at least two for each session: one for its call, one for its end.
        idle_seconds: without a message, the session ends.
        call_seconds: of the longest tool; a call that takes a minute more ends the session. Opening and grading have
            limits of their own.
        on_answer: told every observation.
    """

    def __init__(
        self,
        websocket: WebSocket,
        environment: OpenEnvFeatureDeletion,
        threads: Executor,
        *,
        idle_seconds: float,
        call_seconds: float,
        on_answer: Callable[[AttemptObservation], None],
    ) -> None:
        self._websocket = websocket
        self._environment = environment
        self._threads = threads
        self._idle_seconds = idle_seconds
        self._call_seconds = call_seconds
        self._on_answer = on_answer
        self._asked: asyncio.Queue[Asked] = asyncio.Queue(_MAX_WAITING)
        self._over: asyncio.Future[SessionOverError] = asyncio.get_running_loop().create_future()
        self._stop = threading.Event()
        self._job: asyncio.Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an attempt or a call is under way."""
        return not self._environment.state.is_over or (self._job is not None and not self._job.done())

    def end(self, error: ComposerError | None, close_code: int = _NORMAL) -> None:
        """Let the session end now, whatever it does; its own ``run`` does the work."""
        if not self._over.done():
            self._over.set_result(SessionOverError(error, close_code))

    async def run(self) -> None:
        """Answer until the end. ``close`` must follow."""
        reader = asyncio.create_task(self._read())
        try:
            while True:
                await self._send(await self._answer(await self._next()))
        except SessionOverError as over:
            with suppress(SessionOverError):
                if over.error is not None:
                    await self._send(error_frame(over.error, WSErrorCode.SESSION_ERROR))
                await self._hang_up(over.close_code)
        finally:
            reader.cancel()

    async def close(self) -> None:
        """Kill what the last call runs, and take the sandbox away; nothing of the session is left then."""
        self._stop.set()
        await self._in_thread(self._environment.close)
        if self._job is not None:
            await asyncio.wait({self._job})  # a reset that was under way has opened a sandbox since
            await self._in_thread(self._environment.close)

    async def _read(self) -> None:
        """Take every frame as it comes: only so a client that vanishes is noticed during a call."""
        while True:
            try:
                event = await self._websocket.receive()
            except (RuntimeError, WebSocketDisconnect):
                event = {"type": "websocket.disconnect"}
            if event["type"] == "websocket.disconnect":
                self.end(None)
                return
            frame = event.get("text")
            try:
                self._asked.put_nowait(read_frame(event.get("bytes") or b"" if frame is None else frame))
            except asyncio.QueueFull:
                self.end(_flooded(), _POLICY)
                return

    async def _next(self) -> Asked:
        asked = asyncio.create_task(self._asked.get())
        either: set[asyncio.Future[Any]] = {asked, self._over}
        await asyncio.wait(either, timeout=self._idle_seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._over.done():
            asked.cancel()
            raise self._over.result()
        if not asked.done():
            asked.cancel()
            raise SessionOverError(_idle(self._idle_seconds), _POLICY)
        return asked.result()

    async def _answer(self, asked: Asked) -> str:
        try:
            match asked:
                case ResetAsked(arguments):
                    return await self._observed(lambda: self._environment.reset(**arguments), seconds=None)
                case StepAsked(action):
                    seconds = self._call_seconds + _GRACE_SECONDS
                    return await self._observed(lambda: self._environment.step(action), seconds=seconds)
                case StateAsked():
                    return state_frame(self._environment.state)
                case NotUnderstood(kind, error):
                    return error_frame(error, kind)
                case CloseAsked():
                    raise SessionOverError(None)
        except ComposerError as error:
            return error_frame(error)

    async def _observed(self, act: Callable[[], AttemptObservation], seconds: float | None) -> str:
        observation = await self._work(act, seconds)
        self._on_answer(observation)
        return observation_frame(observation)

    async def _work(self, act: Callable[[], T], seconds: float | None) -> T:
        """Do it in a thread, and stay open for whatever ends the session."""

        def stoppable() -> T:
            with interruptible_by(self._stop):
                return act()

        job = asyncio.get_running_loop().run_in_executor(self._threads, stoppable)
        self._job = job
        job.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has looked
        either: set[asyncio.Future[Any]] = {job, self._over}
        while True:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                raise self._over.result()
            if job.done():
                break
            if not self._environment.is_grading:
                raise SessionOverError(_late(seconds or 0.0), _AWAY)
        try:
            return job.result()
        except ComposerError:
            raise
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            raise SessionOverError(_fault(error), _AWAY) from error

    async def _in_thread(self, act: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, act)
        except Exception as error:  # noqa: BLE001  the session is over, whatever its end says; it is written down
            traceback.print_exception(error, file=sys.stderr)

    async def _send(self, frame: str) -> None:
        try:
            async with asyncio.timeout(_SEND_SECONDS):
                await self._websocket.send_text(frame)
        except (RuntimeError, WebSocketDisconnect, OSError) as error:  # gone; a TimeoutError is an OSError
            raise SessionOverError(None) from error

    async def _hang_up(self, close_code: int) -> None:
        with suppress(RuntimeError, WebSocketDisconnect, OSError):
            async with asyncio.timeout(_SEND_SECONDS):
                await self._websocket.close(close_code)


def _flooded() -> ComposerError:
    return UsageError(
        "CR0854",
        f"more than {_MAX_WAITING} messages were sent before their answers had come.",
        where="/ws",
        fix="send one, and wait for its answer.",
    )


def _idle(seconds: float) -> ComposerError:
    return UsageError(
        "CR0855",
        f"the session was ended: nothing came for {seconds:g} s.",
        where="/ws",
        fix="connect again and reset; serve-env --session-seconds says how long it waits.",
    )


def _late(seconds: float) -> ComposerError:
    return MissingError(
        "CR0855",
        f"the session was ended: a call did not come back within {seconds:g} s; its attempt is not to be scored.",
        where="/ws",
        fix="connect again and reset; serve-env --call-seconds says how long a tool may take.",
    )


def _fault(error: Exception) -> ComposerError:
    return ComposerError(
        "CR0855",
        f"the session was ended by a fault of the server: {type(error).__name__}; its attempt is not to be scored.",
        where="/ws",
        fix="connect again and reset; the server's standard error has the traceback.",
    )
