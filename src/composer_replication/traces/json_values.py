"""Foreign JSON: records of files, of which what is damaged is counted and the rest goes on; values that may hold anything anywhere."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

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
    if path.suffix in _LINES:
        with path.open(
            "rb", buffering=256 * 1024
        ) as file:  # asking for 8 KiB at a time takes four times as long
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) >= MAX_LINE_BYTES:
                    while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                        pass
                    ledger.dropped("a line above 64 MiB")
                elif not line.isspace():
                    yield from _objects(line, ledger)
        return
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


def text_of(value: Any) -> str:
    """Text of a content that is text, a part or a list of parts; what is no text is named in its place."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(part for part in map(text_of, value) if part)
    if isinstance(value, dict):
        for key in ("text", "content", "refusal", "output"):
            if isinstance(value.get(key), str | list):
                return text_of(value[key])
        kind = value.get("type")
        return f"[{kind}]" if isinstance(kind, str) and kind not in ("thinking", "reasoning") else ""
    return "" if value is None else str(value)


def at(value: Any, *path: str) -> Any:
    """What stands at the end of a path of keys; None where it breaks off."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def items(value: Any) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def string(value: Any) -> str:
    """The value where it is text, else an empty one."""
    return value if isinstance(value, str) else ""


def flag(value: Any) -> bool | None:
    """The value where it is true or false."""
    return value if isinstance(value, bool) else None


def integer(value: Any) -> int | None:
    """The value where it is a whole number."""
    return value if type(value) is int else None


def parsed(value: Any) -> Any:
    """What a text of JSON holds; the value itself where it is none."""
    try:
        return from_json(value, allow_inf_nan=False) if isinstance(value, str) else value
    except (TypeError, ValueError):  # half a pair of surrogates is a TypeError
        return value


def arguments_text(value: Any) -> str:
    """Arguments as the model wrote them, or as JSON."""
    return value if isinstance(value, str) else json_bytes({} if value is None else value).decode()


def json_value(data: bytes) -> Any:
    """What bytes of JSON hold; half of a pair of surrogates, which some programs leave when they cut text, becomes "?".

    Raises:
        ValueError: they are no JSON.
    """
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError:
        whole = json.dumps(json.loads(data), ensure_ascii=False, allow_nan=False)
        return json.loads(whole.encode("utf-8", "replace"))


def json_bytes(value: Any) -> bytes:
    """A value as JSON without spaces; a number that is none (``1e999`` was read as infinite) becomes null."""
    try:
        return to_json(value, inf_nan_mode="null")
    except ValueError:  # half a pair of surrogates, or very deep
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
