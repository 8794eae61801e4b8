"""How a server of environments is run, and the address that it takes; nothing of OpenEnv is needed for it."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

from composer_replication.errors import UsageError
from composer_replication.rollouts.tools.tool_limits import ToolLimits

_BACKLOG = 128
_MAX_PORT = 65535
_MAX_SESSIONS = 1024


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Bounds of a server.

    Args:
        max_sessions: clients at the same time; the next one is refused with a sentence. Each may hold a sandbox.
        session_seconds: without a message, a session ends.
        call_seconds: of the longest tool (command, search, run of the visible tests).
        max_calls: of one attempt; then it is graded as it stands.
        drain_seconds: how long attempts may go on when the server is told to end.

    Raises:
        UsageError: a number out of range (CR0206).
    """

    max_sessions: int = 8
    session_seconds: float = 600.0
    call_seconds: float = 300.0
    max_calls: int = 100
    drain_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.max_sessions <= _MAX_SESSIONS:
            raise _out_of_range("max_sessions", self.max_sessions, f"from 1 to {_MAX_SESSIONS}")
        if self.max_calls < 1:
            raise _out_of_range("max_calls", self.max_calls, "from 1 up")
        for name in ("session_seconds", "call_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise _out_of_range(name, getattr(self, name), "above 0 and finite")
        if not 0 <= self.drain_seconds < math.inf:
            raise _out_of_range("drain_seconds", self.drain_seconds, "from 0 up and finite")

    def tool_limits(self) -> ToolLimits:
        """No tool takes longer than a call may: what a policy makes slow is its own result, never a lost attempt."""
        usual = ToolLimits()
        return ToolLimits(
            max_command_seconds=min(usual.max_command_seconds, self.call_seconds),
            search_seconds=min(usual.search_seconds, self.call_seconds),
            test_seconds=min(usual.test_seconds, self.call_seconds),
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; clients wait in its queue until they are served. Port 0 takes a free one.

    Raises:
        UsageError: the address cannot be taken (CR0850).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not 0 <= port <= _MAX_PORT:
            raise OSError(f"ports go from 0 to {_MAX_PORT}")
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        raise UsageError(
            "CR0850",
            f"nothing can listen on port {port} of {host}: {why.lower()}.",
            where="--host, --port",
            fix="take --port 0 for a free port, 127.0.0.1 for clients on this machine, 0.0.0.0 for those on others too.",
        ) from error


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _out_of_range(name: str, value: float, right: str) -> UsageError:
    flag = f"--{name.replace('_', '-')}"
    return UsageError(
        "CR0206", f"{flag} is {value:g}; it must be {right}.", where=flag, fix="composer-rl serve-env --help"
    )
