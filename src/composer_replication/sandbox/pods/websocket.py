"""The client's side of a WebSocket (RFC 6455): binary messages, control frames, a clean or unclean end."""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from composer_replication.sandbox.pods.api_client import ApiClient, refusal_of

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_MOST_BYTES = 1 << 26
_HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 18
_SEND_SECONDS = 60.0


class WebSocketEndedError(Exception):
    """The connection is over; ``code`` is 1000 for a proper end, 1006 where nobody said goodbye."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class WebSocket:
    """One connection, used by one thread.

    Args:
        client: of the cluster.
        target: path and query.
        protocols: subprotocols, the best first; ``protocol`` is the one that the server chose.

    Raises:
        ApiRefusal: the server answered with an error status.
        SandboxFailure: it cannot be reached, or is no WebSocket server (CR0331).
    """

    def __init__(self, client: ApiClient, target: str, protocols: Sequence[str]) -> None:
        self._buffer = bytearray()
        self._parts = bytearray()
        self._is_in_message = False
        self.protocol = ""
        connection = client.connection()
        try:
            connection.connect()
            assert connection.sock is not None
            self._socket: socket.socket = connection.sock
            self._shake_hands(client, f"{connection.host}:{connection.port}", target, protocols)
        except (OSError, ValueError) as error:
            connection.close()
            raise client.gone(error) from error
        except BaseException:
            connection.close()
            raise

    def _shake_hands(self, client: ApiClient, host: str, target: str, protocols: Sequence[str]) -> None:
        key = base64.b64encode(os.urandom(16))
        lines = [
            f"GET {target} HTTP/1.1",
            f"Host: {host}",
            "Connection: Upgrade",
            "Upgrade: websocket",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {key.decode()}",
            f"Sec-WebSocket-Protocol: {', '.join(protocols)}",
            *(f"{name}: {value}" for name, value in client.authorization().items()),
        ]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        while b"\r\n\r\n" not in self._buffer:
            chunk = self._socket.recv(4096)
            if not chunk:
                raise ConnectionResetError("it hung up")
            self._buffer += chunk
            if len(self._buffer) > _HEAD_BYTES:
                raise ValueError("its answer is no HTTP")
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        words = head.split(b"\r\n")[0].split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            raise ValueError("its answer is no HTTP")
        if int(words[1]) != 101:
            raise refusal_of(int(words[1]), self._rest_of_answer(head))
        headers = _headers(head)
        accept = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode()
        self.protocol = headers.get("sec-websocket-protocol", "")
        if headers.get("sec-websocket-accept") != accept or self.protocol not in protocols:
            raise ValueError("it does not agree on a WebSocket")

    def _rest_of_answer(self, head: bytes) -> bytes:
        length = _headers(head).get("content-length", "")
        wanted = min(int(length), _HEAD_BYTES) if length.isdigit() else 0
        with suppress(OSError):
            while len(self._buffer) < wanted and (chunk := self._socket.recv(4096)):
                self._buffer += chunk
        return bytes(self._buffer)

    def send(self, payload: bytes) -> None:
        """One binary message.

        Raises:
            WebSocketEndedError: the connection is over.
        """
        self._send_frame(_BINARY, payload)

    def receive(self, patience_seconds: float) -> bytes | None:
        """The next message; None when none came in time.

        Raises:
            WebSocketEndedError: the connection is over, or what came is no WebSocket.
        """
        deadline = time.monotonic() + patience_seconds
        while True:
            message = self._next_message()
            if message is not None:
                return message
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._socket.settimeout(left)
            try:
                chunk = self._socket.recv(_CHUNK_BYTES)
            except TimeoutError:
                return None
            except OSError as error:
                raise WebSocketEndedError(1006, str(error)) from error
            if not chunk:
                raise WebSocketEndedError(1006, "the connection was cut")
            self._buffer += chunk

    def close(self) -> None:
        """Say goodbye and hang up; nothing is waited for."""
        with suppress(WebSocketEndedError):
            self._send_frame(_CLOSE, (1000).to_bytes(2, "big"))
        with suppress(OSError):
            self._socket.close()

    def _next_message(self) -> bytes | None:
        while (frame := self._next_frame()) is not None:
            is_last, kind, payload = frame
            if kind == _PING:
                with suppress(WebSocketEndedError):  # what came behind it still counts
                    self._send_frame(_PONG, payload)
            elif kind == _CLOSE:
                code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else 1005
                raise WebSocketEndedError(code, payload[2:].decode(errors="replace"))
            elif kind in (_TEXT, _BINARY, _CONTINUATION):
                if (kind == _CONTINUATION) != self._is_in_message:
                    raise WebSocketEndedError(1002, "a message begins in the middle")
                self._parts += payload
                self._is_in_message = not is_last
                if len(self._parts) > _MOST_BYTES:
                    raise WebSocketEndedError(1009, "a message is too long")
                if is_last:
                    message, self._parts = bytes(self._parts), bytearray()
                    return message
            elif kind != _PONG:
                raise WebSocketEndedError(1002, "a frame of an unknown kind")
        return None

    def _next_frame(self) -> tuple[bool, int, bytes] | None:
        """(is last, kind, payload), or None while it is not all there."""
        data = self._buffer
        if len(data) < 2:
            return None
        kind, length, start = data[0] & 0x0F, data[1] & 0x7F, 2
        if data[0] & 0x70 or data[1] & 0x80:
            raise WebSocketEndedError(1002, "a frame that no server sends")
        if length >= 126:
            start += 2 if length == 126 else 8
            if len(data) < start:
                return None
            length = int.from_bytes(data[2:start], "big")
        if length > _MOST_BYTES or (kind >= _CLOSE and (length > 125 or not data[0] & 0x80)):
            raise WebSocketEndedError(1002, "a frame of an impossible length")
        if len(data) < start + length:
            return None
        payload = bytes(data[start : start + length])
        is_last = bool(data[0] & 0x80)
        del data[: start + length]
        return is_last, kind, payload

    def _send_frame(self, kind: int, payload: bytes) -> None:
        length = len(payload)
        head = bytearray([0x80 | kind])
        if length < 126:
            head.append(0x80 | length)
        elif length < 1 << 16:
            head += bytes([0x80 | 126]) + length.to_bytes(2, "big")
        else:
            head += bytes([0x80 | 127]) + length.to_bytes(8, "big")
        mask = os.urandom(4)
        try:
            self._socket.settimeout(_SEND_SECONDS)
            self._socket.sendall(bytes(head) + mask + masked(payload, mask))
        except OSError as error:
            raise WebSocketEndedError(1006, str(error)) from error


def masked(payload: bytes, mask: bytes) -> bytes:
    """``payload`` xor ``mask`` repeated; its own inverse."""
    length = len(payload)
    long_mask = (mask * (length // 4 + 1))[:length]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(long_mask, "big")).to_bytes(length, "big")


def _headers(head: bytes) -> dict[str, str]:
    pairs = (line.decode("latin-1").partition(":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}
