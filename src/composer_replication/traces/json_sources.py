"""Records of files, which are lines of JSON or one document: what is damaged is counted and the rest goes on."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_replication.traces.json_values import json_value
from composer_replication.traces.trace_records import Ledger

MAX_LINE_BYTES = 64 * 1024**2
MAX_DOCUMENT_BYTES = 256 * 1024**2
NUM_HEAD = 20
"""Records that a format is known by."""
_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (*_LINES, ".json", ".traj")
_FIRST_KEY = re.compile(r'\{"(?:parentUuid|timestamp|type|messageId|uuid)"')
"""Where another record may begin inside a damaged line."""
_DAMAGED = (ValueError, RecursionError)


def trace_files(path: Path) -> list[Path]:
    """The file itself, or every file of a folder that may hold records, by name; links are not followed."""
    if path.is_file():
        return [path]
    found = (each for each in path.rglob("*") if each.is_file() and not each.is_symlink())
    return sorted(each for each in found if each.suffix in _SUFFIXES)


def read_records(path: Path, ledger: Ledger) -> Iterator[Any]:
    """The objects of a file in its order; each counts as one record of ``ledger``, and so does each damaged piece.

    A line of two objects gives both; a document that is a list gives itself, whole.
    """
    if path.suffix not in _LINES:
        yield from _document(path, ledger)
        return
    with path.open("rb", buffering=256 * 1024) as file:  # asking for 8 KiB at a time takes four times as long
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) >= MAX_LINE_BYTES:
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                ledger.dropped("a line above 64 MiB")
            elif not line.isspace():
                yield from _objects(line, ledger)


def first_records(path: Path) -> list[Any]:
    """Some of the first objects, for the detection of the format: none where nothing can be read."""
    try:
        return list(itertools.islice(read_records(path, Ledger()), NUM_HEAD))
    except OSError:
        return []


def _objects(line: bytes, ledger: Ledger) -> Iterator[Any]:
    try:
        found: Any = json_value(line)
    except _DAMAGED:
        yield from _cut_together(line.decode("utf-8", "replace").strip(), ledger)
        return
    if isinstance(found, dict):
        ledger.num_records += 1
        yield found
    else:
        ledger.dropped("a line that is no object")


def _cut_together(text: str, ledger: Ledger) -> Iterator[Any]:
    """What can be saved of a line in which one record ends and another begins."""
    decoder, place, is_whole = json.JSONDecoder(), 0, True
    while place < len(text):
        try:
            found, place = decoder.raw_decode(text, place)
        except _DAMAGED:
            is_whole = False
            following = _FIRST_KEY.search(text, place + 1)
            place = len(text) if following is None else following.start()
            continue
        if isinstance(found, dict):
            ledger.num_records += 1
            yield found
    if not is_whole:
        ledger.dropped("damaged JSON")


def _document(path: Path, ledger: Ledger) -> Iterator[Any]:
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        ledger.dropped("a document above 256 MiB")
        return
    try:
        found = json_value(path.read_bytes())
    except (*_DAMAGED, OSError):
        ledger.dropped("damaged JSON")
        return
    if isinstance(found, dict | list):
        ledger.num_records += 1
        yield found
    else:
        ledger.dropped("a document that is no object")
