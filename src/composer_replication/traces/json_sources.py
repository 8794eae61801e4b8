"""Records of files: lines of JSON, one document, packed or not; what is damaged is counted and the rest goes on."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from composer_replication.traces.trace_records import Ledger

MAX_LINE_BYTES = 64 * 1024**2
MAX_DOCUMENT_BYTES = 256 * 1024**2
HEAD_BYTES = 1024**2
"""Of what a format is known by."""
SUFFIXES = (".jsonl", ".json", ".traj", ".ndjson")
_PACKED = (".gz", ".zst")
_DECODER = json.JSONDecoder()


def trace_files(path: Path) -> list[Path]:
    """The file itself, or every file of a folder that may hold records, by name; links are not followed."""
    if path.is_file():
        return [path]
    found = (each for each in path.rglob("*") if each.is_file() and not each.is_symlink())
    return sorted(each for each in found if _bare_name(each).endswith(SUFFIXES))


def is_lines(path: Path) -> bool:
    """Whether its records are lines: by the name, else by a first line that is a whole object."""
    name = _bare_name(path)
    if not name.endswith((".jsonl", ".ndjson")):
        return False
    with open_bytes(path) as file:
        first = file.readline(HEAD_BYTES).strip()
    return first not in (b"{", b"[")  # a document under the name of lines, as some programs write


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked."""
    if path.name.endswith(".gz"):
        return gzip.open(path)  # type: ignore[return-value]  # reads as any file of bytes does
    if path.name.endswith(".zst"):
        import zstandard

        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True))
    return path.open("rb")


def read_records(path: Path, ledger: Ledger) -> Iterator[Any]:
    """The objects of a file in its order; each counts as one record of ``ledger``, and so does each damaged piece.

    A line of two objects gives both; a document that is a list gives itself, whole.
    """
    if not is_lines(path):
        yield from _document(path, ledger)
        return
    with open_bytes(path) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if not line.endswith(b"\n") and len(line) >= MAX_LINE_BYTES:
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                ledger.num_records += 1
                ledger.dropped("a line above 64 MiB")
            elif line.strip():
                yield from _objects(line, ledger)


def first_records(path: Path) -> list[Any]:
    """Some of the first objects, for the detection of the format: none where nothing can be read."""
    try:
        if not is_lines(path):
            return list(_document(path, Ledger()))
        with open_bytes(path) as file:
            lines = file.read(HEAD_BYTES).split(b"\n")[:20]
    except (OSError, EOFError, ValueError):
        return []
    return [each for line in lines if line.strip() for each in _objects(line, Ledger())]


def _objects(line: bytes, ledger: Ledger) -> Iterator[Any]:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        yield from _cut_together(line, ledger)
        return
    ledger.num_records += 1
    if isinstance(found, dict):
        yield found
    else:
        ledger.dropped("a line that is no object")


def _cut_together(line: bytes, ledger: Ledger) -> Iterator[Any]:
    """What can be saved of a line in which one record ends and another begins."""
    text = line.decode("utf-8", "replace").strip()
    place, is_whole = 0, True
    while place < len(text):
        start = place
        try:
            found, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            is_whole = False
            place = _next_record(text, start + 1)
            continue
        if isinstance(found, dict):
            ledger.num_records += 1
            yield found
    if not is_whole:
        ledger.num_records += 1
        ledger.dropped("damaged JSON")


def _next_record(text: str, place: int) -> int:
    """Where another record may begin inside a damaged line: records begin with one of a few keys."""
    starts = [found for key in _FIRST_KEYS if (found := text.find(key, place)) >= 0]
    return min(starts, default=len(text))


_FIRST_KEYS = ('{"parentUuid"', '{"timestamp"', '{"type"', '{"messageId"', '{"uuid"')


def _document(path: Path, ledger: Ledger) -> Iterator[Any]:
    try:
        with open_bytes(path) as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            ledger.num_records += 1
            ledger.dropped("a document above 256 MiB")
            return
        found = json.loads(data)
    except (ValueError, RecursionError, OSError, EOFError):
        ledger.num_records += 1
        ledger.dropped("damaged JSON")
        return
    ledger.num_records += 1
    if isinstance(found, dict | list):
        yield found
    else:
        ledger.dropped("a document that is no object")


def _bare_name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".zst")
