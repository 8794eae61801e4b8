"""One hash for what a task is made of, blind to how it is laid out.

A small scanner finds strings and comments. The standard ``tokenize`` is not used on
purpose: what it accepts and how it cuts f-strings differ between Python versions, and
the hash must be the same on every machine. Text that no Python would accept is scanned
by the same rules, so there is no second path.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

STRING_PATTERN = r'''
      """[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""
    | \'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'
    | "(?:\\.|[^"\\\n])*"
    | '(?:\\.|[^'\\\n])*'
'''
"""A string without its prefix, to be compiled with ``DOTALL`` and ``VERBOSE``."""

_STRING_OR_COMMENT = re.compile(rf"{STRING_PATTERN}| (?P<comment>\#[^\n]*)", re.DOTALL | re.VERBOSE)


def normalised_text(text: str, *, is_python: bool) -> str:
    """Text without white space and, for Python, without comments.

    All white space goes, in strings too: ``a b`` and ``ab`` count as the same. For
    finding copies that is the safe side.
    """
    if is_python:
        text = _STRING_OR_COMMENT.sub(lambda match: "" if match["comment"] else match[0], text)
    return "".join(text.replace("\ufeff", "").split())


class ContentDigest:
    """Hashes tasks; equal files (tasks of one repository share most) are read once."""

    def __init__(self) -> None:
        self._by_raw_sha256: dict[tuple[bytes, bool], str] = {}

    def of_task(self, item: Any) -> str | None:
        """sha256 hex over an item's broken tree, tests and golden; None if it has no text.

        Task id, repository, symbol, file names and file order do not count; files that
        are empty once normalised, and second copies of a file, do not count either. An
        item with neither tree nor golden (a ``records.Task``) has no content to look at.

        Raises:
            TypeError: a part is neither text, nor texts, nor a mapping from path to text.
        """
        named = {name: getattr(item, name, None) for name in ("broken_tree", "tests", "golden")}
        if named["broken_tree"] is None and named["golden"] is None:
            return None
        parts = [self._of_part(part) for part in named.values()]
        if not any(parts):
            return None
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _of_part(self, part: object) -> list[str]:
        if part is None:
            return []
        texts = [part] if isinstance(part, str) else part
        if isinstance(texts, list | tuple):
            texts = {f"{position}.py": text for position, text in enumerate(texts)}
        if not isinstance(texts, Mapping):
            raise TypeError(f"expected text, or a mapping from path to text, got {type(part).__name__}")
        hashes = {self._of_file(str(path), text) for path, text in texts.items()}
        return sorted(hashes - {""})

    def _of_file(self, path: str, text: object) -> str:
        if not isinstance(text, str):
            raise TypeError(f"expected the text of {path}, got {type(text).__name__}")
        is_python = path.endswith((".py", ".pyi"))
        key = (hashlib.sha256(_encoded(text)).digest(), is_python)
        if key not in self._by_raw_sha256:
            normalised = normalised_text(text, is_python=is_python)
            self._by_raw_sha256[key] = hashlib.sha256(_encoded(normalised)).hexdigest() if normalised else ""
        return self._by_raw_sha256[key]


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
