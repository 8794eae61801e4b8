"""A server of environments for OpenEnv's clients, by OpenEnv's own server: a WebSocket (/ws) is a session with its sandbox.

Its ``POST /reset`` and ``/step`` make an environment for each request, so that nothing can be done over several of them:
they are left out (its mode ``production``).
"""

from __future__ import annotations

import functools
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import HTTPEnvServer
from openenv.core.env_server.types import ConcurrencyConfig

from composer_replication.records import MonitorMode
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.openenv_client import AttemptObservation, ToolAction
from composer_replication.rollouts.environment.openenv_environment import OpenEnvFeatureDeletion
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.tool_limits import ToolLimits
from composer_replication.sandbox import runs_interrupted

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MAX_MESSAGE_BYTES = 8 * 1024**2
_PING_SECONDS, _PONG_SECONDS = 20.0, 60.0  # a client whose machine has gone sends no farewell
_GRACEFUL_SECONDS = 5
_POLICY, _FORBIDDEN = 1008, 403
_LONGEST_CALL_SECONDS = ToolLimits().max_command_seconds
"""The library knows when it last answered, not that a call is under way."""


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
        own = functools.partial(FeatureDeletionEnv, grader, monitor=monitor)
        bounds = ConcurrencyConfig(
            max_concurrent_envs=max_sessions, session_timeout=session_seconds + _LONGEST_CALL_SECONDS
        )
        environment = functools.partial(
            OpenEnvFeatureDeletion, own, max_calls=max_calls, counts=self.counts, living=self._open
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
