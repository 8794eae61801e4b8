"""A threaded HTTP/1.1 server whose answers can be made to go wrong, one request at a time."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class Fault:
    """What to do in the place of the answer to requests whose ``METHOD PATH`` matches; so many times."""

    pattern: str
    act: Callable[[Any], None]
    times: int = 1


class FaultyServer(ThreadingMixIn):
    """Mixed into a socket server."""

    daemon_threads = True
    request_queue_size = 64

    def prepare(self) -> None:
        self.faults: list[Fault] = []
        self.seen: list[str] = []
        self.bodies: list[tuple[str, Any]] = []
        self.connections: set[socket.socket] = set()
        self.lock = threading.RLock()

    def take_fault(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None

    def cut_connections(self) -> None:
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of these tests hang up on purpose."""


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def address_string(self) -> str:
        return "test"

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def answer(self) -> None:
        parts = urlsplit(self.path)
        self.route = re.sub(r"^/v\d+\.\d+", "", parts.path)
        self.query = parse_qs(parts.query, keep_blank_values=True)
        self.data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        line = f"{self.command} {self.route}"
        self.server.seen.append(line)
        fault = self.server.take_fault(line)
        if fault is not None:
            fault.act(self)
            return
        self.respond()

    do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = answer

    def respond(self) -> None:
        raise NotImplementedError

    def say(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        text = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, content in (headers or {}).items():
            self.send_header(name, content)
        if text:
            self.send_header("Content-Type", "application/json")
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def status(code: int, message: str, headers: dict[str, str] | None = None) -> Callable[[Any], None]:
    """A fault: answer with this status."""
    return lambda handler: handler.say(code, {"message": message, "code": code}, headers)


def hang_up(handler: Any) -> None:
    """A fault: close the connection without an answer."""
    handler.close_connection = True
    with suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


def no_http(handler: Any) -> None:
    """A fault: something that is no HTTP at all."""
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    hang_up(handler)


def no_json(handler: Any) -> None:
    """A fault: a page of a proxy, say."""
    handler.send_response(200)
    handler.send_header("Content-Length", "6")
    handler.end_headers()
    handler.wfile.write(b"<html>")
