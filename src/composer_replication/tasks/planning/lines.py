"""Where the lines of a text begin, however they end."""

from __future__ import annotations

import re

LINE_END = re.compile(r"\r\n|\r|\n")


class Lines:
    """Where each line of a text begins, and offsets for the positions that ``ast`` gives."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in LINE_END.finditer(text))]

    def line(self, number: int) -> str:
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end]

    def offset(self, number: int, column_bytes: int) -> int:
        line = self.line(number)
        return self.starts[number - 1] + len(line.encode()[:column_bytes].decode())

    def end_of_line(self, number: int) -> int:
        return self.starts[number - 1] + len(self.line(number).rstrip("\r\n"))
