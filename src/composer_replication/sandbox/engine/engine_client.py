"""Speak the Docker Engine API over a unix socket: requests, and one attached stream.

Podman's service answers the same paths. One connection a request: a daemon that restarts between
two of them is not noticed, and threads share nothing.
Reference: Docker Engine API v1.43, https://docs.docker.com/reference/api/engine/version/v1.43/.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from composer_replication.errors import SandboxFailure
from composer_replication.sandbox.jailed_tree import failure

_HEAD_BYTES = 1 << 16
_OLDEST_API = (1, 41)  # what Podman 4 and 5 say that they speak; every field that is used is in it


class EngineRefusal(Exception):
    """An answer with an error status; ``message`` is what the engine says about it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class EngineClient:
    """One engine.

    Args:
        socket_path: of this machine.
        timeout_seconds: how long one answer may take; an import or a start has to fit.
    """

    def __init__(self, socket_path: str, *, timeout_seconds: float = 60.0) -> None:
        self.socket_path = socket_path
        self._timeout_seconds = timeout_seconds
        self._prefix = ""

    def negotiate(self) -> str:
        """Take the engine's own version of the API from now on; the engine's name.

        Raises:
            SandboxFailure: no engine there (CR0320), or one that is too old (CR0321).
        """
        answer = self.ask("GET", "/version")
        version = str(answer.get("ApiVersion", "")) if isinstance(answer, dict) else ""
        try:
            major, minor = (int(part) for part in version.split("."))
        except ValueError:
            raise failure("CR0321", "what listens there is no container engine.", self.socket_path) from None
        if (major, minor) < _OLDEST_API:
            raise failure("CR0321", f"the engine speaks API {version}, and 1.41 is needed.", self.socket_path)
        self._prefix = f"/v{version}"
        return " ".join(str(part.get("Name")) for part in answer.get("Components") or [])

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        data: bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """One request; the answer's JSON, its lines as a list where there are several, None when empty.

        ``body`` is sent as JSON, ``data`` in its place as a tar file.

        Raises:
            EngineRefusal: the engine answered with an error status.
            SandboxFailure: it does not listen, hangs up or is silent (CR0320), or answers what is no JSON (CR0321).
        """
        payload = data if body is None else json.dumps(body).encode()
        headers = {"Host": "engine", "Connection": "close"}
        if payload is not None:
            headers["Content-Type"] = "application/x-tar" if body is None else "application/json"
        connection = _UnixConnection(self.socket_path, timeout_seconds or self._timeout_seconds)
        try:
            connection.request(method, self._target(path, query), payload, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise EngineRefusal(answer.status, _message(text))
        return self._parsed(text)

    def attach(self, container: str) -> tuple[socket.socket, bytes]:
        """Take over the streams of a container: the socket, and bytes that came with the answer's head.

        Raises:
            EngineRefusal: an error status.
            SandboxFailure: no engine, or no HTTP (CR0320).
        """
        query = dict.fromkeys(("stream", "stdin", "stdout", "stderr"), "1")
        target = self._target(f"/containers/{quote(container, safe='')}/attach", query)
        head = f"POST {target} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.settimeout(self._timeout_seconds)
            channel.connect(self.socket_path)
            channel.sendall(head.encode())
            status, num_bytes, rest = _read_head(channel)
            if status not in (101, 200):
                while len(rest) < num_bytes and (chunk := channel.recv(num_bytes - len(rest))):
                    rest += chunk
                raise EngineRefusal(status, _message(rest))
        except (OSError, ValueError) as error:
            channel.close()
            raise self._gone(error) from error
        except BaseException:
            channel.close()
            raise
        channel.setblocking(False)
        return channel, rest

    def _target(self, path: str, query: Mapping[str, str] | None) -> str:
        return f"{self._prefix}{path}{'?' + urlencode(query) if query else ''}"

    def _gone(self, error: Exception) -> SandboxFailure:
        why = "it does not answer in time" if isinstance(error, TimeoutError) else str(error) or "it hung up"
        return failure("CR0320", f"the container engine cannot be asked: {why[:300]}.", self.socket_path)

    def _parsed(self, text: bytes) -> Any:
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except ValueError:
            pass
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise failure("CR0321", "the container engine's answer is no JSON.", self.socket_path) from error


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__("engine", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _read_head(channel: socket.socket) -> tuple[int, int, bytes]:
    """Status, how many bytes follow (0 where that is not said), and those that came already."""
    text = b""
    while b"\r\n\r\n" not in text:
        chunk = channel.recv(4096)
        if not chunk:
            raise ConnectionResetError("it hung up")
        text += chunk
        if len(text) > _HEAD_BYTES:
            raise ValueError("its answer is no HTTP")
    head, _, rest = text.partition(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    words = first.split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError("its answer is no HTTP")
    named = dict(field.lower().split(b":", 1) for field in fields if b":" in field)
    length = named.get(b"content-length", b"").strip()
    return int(words[1]), min(int(length), _HEAD_BYTES) if length.isdigit() else 0, rest


def _message(text: bytes) -> str:
    try:
        found = json.loads(text)
        said = str(found["message"] if "message" in found else found.get("cause", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        said = text.decode(errors="replace")
    return " ".join(said.split())[:500] or "no reason given"
