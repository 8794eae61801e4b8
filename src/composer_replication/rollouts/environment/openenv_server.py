"""A server of environments for OpenEnv's clients: one sandbox a session, a bound on sessions, and an orderly end.

    /ws                  sessions, in OpenEnv's protocol
    /health              sessions open and allowed, the sandbox, whether the server is ending (503 then)
    /schema, /metadata   as OpenEnv's own servers answer them

OpenEnv's ``POST /reset`` and ``/step`` make an environment for each request, so that nothing can be done over several
of them, and no bound counts them; they are refused here. The sessions of its ``/mcp`` are not served either.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from socket import socket
from typing import TYPE_CHECKING, Any

import uvicorn
from openenv.core.env_server.types import HealthStatus, SchemaResponse, WSErrorCode
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

from composer_replication.errors import ComposerError, MissingError, UsageError
from composer_replication.records import MonitorMode
from composer_replication.rollouts.environment.attempt import AttemptOptions
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.openenv_environment import OpenEnvFeatureDeletion
from composer_replication.rollouts.environment.openenv_messages import error_frame
from composer_replication.rollouts.environment.openenv_options import ServeOptions, url_of
from composer_replication.rollouts.environment.openenv_session import Session
from composer_replication.rollouts.environment.openenv_types import (
    AttemptObservation,
    AttemptState,
    ToolAction,
)
from composer_replication.rollouts.environment.reward_options import RewardOptions
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.regressions import RegressionCheck
from composer_replication.sandbox import choose_backend, runs_interrupted

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.websockets import WebSocket

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_TRY_LATER, _AWAY, _POLICY = 1013, 1001, 1008
_LOOK_SECONDS = 0.05
_MAX_MESSAGE_BYTES = 8 * 1024**2
_PING_SECONDS, _PONG_SECONDS = 20.0, 60.0  # a client whose machine has gone sends no farewell


@dataclass(slots=True)
class ServedCounts:
    """What a server has done so far. ``num_infrastructure_failures`` are observations that said so.

    ``num_flagged`` are attempts with a finding of the monitor, ``num_masked`` those that were paid 0 at most for it.
    """

    num_sessions: int = 0
    num_refused: int = 0
    num_observations: int = 0
    num_attempts_ended: int = 0
    num_infrastructure_failures: int = 0
    num_flagged: int = 0
    num_masked: int = 0
    last_failure: str = ""


@dataclass(slots=True)
class EnvironmentServer:
    """Serves one store; ``serve`` blocks until a signal ends it.

    Args:
        grader: over the store; closed by whoever made it.
        options: bounds.
        reward: how a reward is made; ``RewardOptions()`` by default.
        monitor: as ``FeatureDeletionEnv``.
    """

    grader: Grader
    options: ServeOptions = field(default_factory=ServeOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    monitor: MonitorMode = "mask"
    counts: ServedCounts = field(default_factory=ServedCounts)
    is_draining: bool = False
    _sessions: set[Session] = field(default_factory=set)
    _signals: list[int] = field(default_factory=list)
    _threads: ThreadPoolExecutor = field(init=False)
    _regressions: RegressionCheck = field(init=False)
    _backend: str = field(init=False)
    _attempts: str = field(init=False)

    def __post_init__(self) -> None:
        num_threads = 2 * self.options.max_sessions  # for each session, its call and its end
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="session")
        self._regressions = RegressionCheck(self.grader)
        self._backend = choose_backend(self.grader.backend).name
        self._attempts = self.grader.attempt_backend().name  # its self-test is no client's time

    def serve(self, listener: socket, announce: Callable[[str], None]) -> str:
        """Serve until a signal, let attempts end, take everything away; the signal's name.

        Args:
            listener: listens already; closed here.
            announce: told the address once sessions are answered.
        """
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        try:
            asyncio.run(self._serve(listener, announce))
        finally:
            listener.close()
            for number, act in before.items():
                signal.signal(number, act)
            self._threads.shutdown()
        return signal.Signals(self._signals[0]).name if self._signals else ""

    def app(self) -> Starlette:
        """The ASGI application; on one event loop at a time."""
        gone = [Route(path, _no_such_way, methods=["GET", "POST"]) for path in ("/reset", "/step", "/state")]
        routes = [
            WebSocketRoute("/ws", self._attend),
            Route("/health", self._health),
            Route("/schema", _schema),
            Route("/metadata", self._metadata),
            *gone,
        ]
        return Starlette(routes=routes)

    async def _serve(self, listener: socket, announce: Callable[[str], None]) -> None:
        config = uvicorn.Config(
            self.app(),
            lifespan="off",
            log_config=None,
            access_log=False,
            ws_max_size=_MAX_MESSAGE_BYTES,
            ws_ping_interval=_PING_SECONDS,
            ws_ping_timeout=_PONG_SECONDS,
            timeout_graceful_shutdown=5,
        )
        web = _QuietServer(config)
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._hear, number, told)
        serving = asyncio.create_task(web.serve([listener]))
        while not web.started and not serving.done():  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(_LOOK_SECONDS)
        if web.started:
            announce(url_of(listener))
        hearing = asyncio.create_task(told.wait())
        await asyncio.wait({serving, hearing}, return_when=asyncio.FIRST_COMPLETED)
        hearing.cancel()
        await self._drain()
        web.should_exit = True
        await serving

    def _hear(self, number: int, told: asyncio.Event) -> None:
        self._signals.append(number)
        told.set()

    async def _drain(self) -> None:
        """No new sessions; idle ones end now, attempts have their time, a second signal ends them at once."""
        self.is_draining = True
        last = time.monotonic() + self.options.drain_seconds
        while self._sessions and time.monotonic() < last and len(self._signals) < 2:
            for session in self._sessions:
                if not session.is_busy:
                    session.end(_ending(), _AWAY)
            await asyncio.sleep(_LOOK_SECONDS)
        for session in self._sessions:
            session.end(_ending(), _AWAY)
        with ExitStack() as stack:
            if self._sessions:
                stack.enter_context(runs_interrupted())  # gradings that are under way, too
            while self._sessions:  # noqa: ASYNC110  at most a moment
                await asyncio.sleep(_LOOK_SECONDS)

    async def _attend(self, websocket: WebSocket) -> None:
        if "origin" in websocket.headers:  # a page in somebody's browser; no client of ours sends one
            await websocket.close(_POLICY)
            return
        await websocket.accept()
        refusal = self._refusal()
        if refusal is not None:
            self.counts.num_refused += 1
            await websocket.send_text(error_frame(refusal, WSErrorCode.CAPACITY_REACHED))
            await websocket.close(_TRY_LATER)
            return
        session = Session(
            websocket,
            self._new_environment(),
            self._threads,
            idle_seconds=self.options.session_seconds,
            call_seconds=self.options.call_seconds,
            on_answer=self._note,
        )
        self._sessions.add(session)
        self.counts.num_sessions += 1
        try:
            await session.run()
        finally:
            await asyncio.shield(asyncio.create_task(self._close(session)))

    async def _close(self, session: Session) -> None:
        """A place is free when nothing is left of its session, so that what is left is bounded as well."""
        try:
            await session.close()
        finally:
            self._sessions.discard(session)

    def _new_environment(self) -> OpenEnvFeatureDeletion:
        attempt = AttemptOptions(tool_limits=self.options.tool_limits())
        own = FeatureDeletionEnv(
            self.grader,
            attempt=attempt,
            reward=self.reward,
            regressions=self._regressions,
            monitor=self.monitor,
        )
        return OpenEnvFeatureDeletion(own, max_calls=self.options.max_calls)

    def _refusal(self) -> ComposerError | None:
        if self.is_draining:
            return _ending()
        if len(self._sessions) < self.options.max_sessions:
            return None
        return MissingError(
            "CR0852",
            f"the server is full: all {self.options.max_sessions} sessions are taken.",
            where="/ws",
            fix="try again later; serve-env --max-sessions says how many there are.",
        )

    def _note(self, observation: AttemptObservation) -> None:
        self.counts.num_observations += 1
        self.counts.num_attempts_ended += observation.done
        self.counts.num_infrastructure_failures += bool(observation.infrastructure_failure)
        report = observation.metadata.get("monitor", {"findings": (), "masks_reward": False})
        self.counts.num_flagged += bool(report["findings"])
        self.counts.num_masked += report["masks_reward"]
        if observation.infrastructure_failure or observation.done or observation.num_calls == 0:
            self.counts.last_failure = observation.infrastructure_failure  # empty again once a sandbox works

    async def _health(self, request: Request) -> JSONResponse:
        del request
        counts = self.counts
        status = HealthStatus.DEGRADED if counts.last_failure else HealthStatus.HEALTHY
        body = {
            "status": str((HealthStatus.UNHEALTHY if self.is_draining else status).value),
            "is_draining": self.is_draining,
            "sessions": {
                "open": len(self._sessions),
                "capacity": self.options.max_sessions,
                "busy": sum(session.is_busy for session in self._sessions),
                "num_served": counts.num_sessions,
                "num_refused": counts.num_refused,
            },
            "sandbox": {
                "backend": self._backend,
                "attempts": self._attempts,
                "is_working": not counts.last_failure,
                "last_failure": counts.last_failure,
                "num_failures": counts.num_infrastructure_failures,
                "not_effective": list(self.grader.missing_guards),
            },
            "monitor": {
                "mode": self.monitor,
                "num_flagged": counts.num_flagged,
                "num_masked": counts.num_masked,
            },
            "num_tasks": len(self.grader.store.task_ids()),
        }
        return JSONResponse(body, 503 if self.is_draining else 200)

    async def _metadata(self, request: Request) -> JSONResponse:
        del request
        return JSONResponse(self._new_environment().get_metadata().model_dump())


class _QuietServer(uvicorn.Server):
    """Leaves signals to whoever runs it: there are sessions to end before the sockets close."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _schema(request: Request) -> JSONResponse:
    del request
    observation = AttemptObservation.model_json_schema()
    schemas: dict[str, Any] = SchemaResponse(
        action=ToolAction.model_json_schema(),
        observation=observation,
        reset_observation=observation,
        state=AttemptState.model_json_schema(),
    ).model_dump()
    return JSONResponse(schemas)


async def _no_such_way(request: Request) -> JSONResponse:
    del request
    error = UsageError(
        "CR0854",
        "attempts are made in sessions: a single request has nothing before it and nothing after.",
        fix="connect a client to /ws.",
    )
    return JSONResponse({"detail": str(error)}, 501)


def _ending() -> ComposerError:
    return MissingError(
        "CR0852",
        "the server is ending; an attempt that was under way is not to be scored.",
        where="/ws",
        fix="connect to another server, or to this one when it is back.",
    )
