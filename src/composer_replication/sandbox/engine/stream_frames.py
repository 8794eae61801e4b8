"""The multiplexed stream of a container: frames of standard output and standard error.

A frame is one byte for the stream (0 standard input, 1 output, 2 error), three zeros, the length of
what follows as four bytes, big-endian, and the bytes. Frames and reads from the socket need not meet.
"""

from __future__ import annotations

_HEADER_BYTES = 8
_STREAMS = {0: 0, 1: 0, 2: 1}  # standard input is only ever echoed; it counts as output
_LARGEST_FRAME = 1 << 30


class FrameError(ValueError):
    """What came is no frame: the stream was cut or mixed up."""


class FrameReader:
    """Takes bytes as they come and keeps the first ``keep_bytes`` of each stream."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._header = bytearray()
        self._left = 0
        self._stream = 0
        self.kept = (bytearray(), bytearray())
        self.truncated = False

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here."""
        return not self._header and self._left == 0

    def take(self, data: bytes) -> None:
        """Take the next bytes of the socket.

        Raises:
            FrameError: a header names no stream, or a length that no engine sends.
        """
        view = memoryview(data)
        while view:
            if self._left == 0:
                view = self._read_header(view)
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            kept = self.kept[self._stream]
            room = self._keep_bytes - len(kept)
            kept += piece[: max(room, 0)]
            self.truncated = self.truncated or len(piece) > room

    def _read_header(self, view: memoryview) -> memoryview:
        missing = _HEADER_BYTES - len(self._header)
        self._header += view[:missing]
        if len(self._header) == _HEADER_BYTES:
            kind, length = self._header[0], int.from_bytes(self._header[4:], "big")
            if kind not in _STREAMS or any(self._header[1:4]) or length > _LARGEST_FRAME:
                raise FrameError(f"a frame begins with {bytes(self._header).hex()}")
            self._stream, self._left = _STREAMS[kind], length
            self._header.clear()
        return view[missing:]
