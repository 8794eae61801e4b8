"""The server's side of a WebSocket, written from RFC 6455 and apart from the client's code."""

from __future__ import annotations

import base64
import hashlib
import struct
import threading
from contextlib import suppress
from typing import Any


class ServerSocket:
    """On top of an HTTP handler that was asked to upgrade."""

    def __init__(self, handler: Any, protocols: list[str]) -> None:
        offered = [word.strip() for word in handler.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        self.protocol = next((word for word in offered if word in protocols), "")
        self._handler = handler
        self._lock = threading.Lock()
        key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        handler.close_connection = True
        handler.wfile.write(
            f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: {self.protocol}\r\n\r\n".encode()
        )

    def frame(self, kind: int, payload: bytes, *, is_last: bool = True) -> None:
        head = bytes([(0x80 if is_last else 0) | kind])
        if len(payload) < 126:
            head += struct.pack("!B", len(payload))
        elif len(payload) < 65536:
            head += struct.pack("!BH", 126, len(payload))
        else:
            head += struct.pack("!BQ", 127, len(payload))
        with self._lock, suppress(OSError, ValueError):
            self._handler.wfile.write(head + payload)
            self._handler.wfile.flush()

    def send(self, payload: bytes) -> None:
        self.frame(2, payload)

    def raw(self, data: bytes) -> None:
        with self._lock, suppress(OSError, ValueError):
            self._handler.wfile.write(data)

    def receive(self) -> bytes | None:
        """The next binary message; None at the end."""
        try:
            while True:
                first, second = self._handler.rfile.read(2)
                length = second & 0x7F
                if length == 126:
                    (length,) = struct.unpack("!H", self._handler.rfile.read(2))
                elif length == 127:
                    (length,) = struct.unpack("!Q", self._handler.rfile.read(8))
                assert second & 0x80, "a client masks"
                mask = self._handler.rfile.read(4)
                data = self._handler.rfile.read(length)
                payload = (
                    bytes(byte ^ mask[number % 4] for number, byte in enumerate(data))
                    if length < 4096
                    else _unmask(data, mask)
                )
                if first & 0x0F == 8:
                    return None
                if first & 0x0F == 2:
                    return payload
        except (OSError, ValueError):
            return None


def _unmask(data: bytes, mask: bytes) -> bytes:
    planes = bytearray(data)
    for number in range(4):
        table = bytes(byte ^ mask[number] for byte in range(256))
        planes[number::4] = planes[number::4].translate(table)
    return bytes(planes)
