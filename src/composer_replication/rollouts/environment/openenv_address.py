"""The address that a server of environments takes; nothing of OpenEnv is needed for it."""

from __future__ import annotations

import socket

from composer_replication.errors import UsageError


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; clients wait in its queue until they are served. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError, UnicodeError) as error:
        why = str(getattr(error, "strerror", None) or error).partition(" (while attempting")[0]
        raise UsageError(
            "CR0850",
            f"nothing can listen on port {port} of {host}: {why.lower().removesuffix('.')}.",
            where="--host, --port",
            fix="take --port 0 for a free port, 127.0.0.1 for clients on this machine, 0.0.0.0 for those on others too.",
        ) from error


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
