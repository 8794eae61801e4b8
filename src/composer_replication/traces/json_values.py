"""Foreign JSON: records of files, of which what is damaged is counted and the rest goes on; values that may hold anything anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from composer_replication.traces.trace_records import Ledger

MAX_LINE_BYTES = 64 * 1024**2
MAX_DOCUMENT_BYTES = 256 * 1024**2  # of longer ones the pieces are damaged JSON, and counted as that
_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (*_LINES, ".json", ".traj")
_SPACES = re.compile(r"\s+")
_T = TypeVar("_T")


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
    is_lines = path.suffix in _LINES
    kinds, what = (dict, "line") if is_lines else (dict | list, "document")
    with path.open("rb", buffering=256 * 1024) as file:  # 8 KiB at a time take four times as long
        lines = iter(partial(file.readline, MAX_LINE_BYTES), b"")
        for piece in lines if is_lines else [file.read(MAX_DOCUMENT_BYTES)]:
            try:
                found: Any = [json_value(piece)]
            except (ValueError, RecursionError):
                found = _saved(piece.decode("utf-8", "replace").strip(), ledger)
            for record in found:
                if isinstance(record, kinds):
                    ledger.num_records += 1
                    yield record
                else:
                    ledger.dropped(f"a {what} that is no object")


def _saved(text: str, ledger: Ledger) -> Iterator[Any]:
    """The values of a line onto which several were written, up to what is damaged, which counts once."""
    decoder, place = json.JSONDecoder(), 0
    try:
        while place < len(text):
            between = _SPACES.match(text, place)
            first = between.end() if between else place
            _, place = decoder.raw_decode(text, first)
            yield json_value(text[first:place].encode())
    except (ValueError, RecursionError):
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


def text_at(value: Any, *path: str) -> str:
    """The text at the end of a path; an empty one where there is none."""
    for key in path:  # called for each field of each record: one call less is a hundredth of all the time
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def items_at(value: Any, *path: str) -> list[Any]:
    """The list at the end of a path; an empty one where there is none."""
    return typed(list, at(value, *path)) or []


def first_at(value: Any, *keys: str) -> Any:
    """What stands at the first of these keys that has anything."""
    return next((found for key in keys if (found := at(value, key)) is not None), None)


def first_text(value: Any, *keys: str) -> str:
    """The text at the first of these keys that has one; an empty one where none has."""
    return next((found for key in keys if (found := text_at(value, key))), "")


def typed(kind: type[_T], value: Any) -> _T | None:
    """The value where it is of this very type: true is no whole number."""
    return value if type(value) is kind else None


def parsed(value: Any) -> Any:
    """What a text of JSON holds; the value itself where it is none."""
    try:
        return from_json(value, allow_inf_nan=False) if isinstance(value, str) else value
    except (TypeError, ValueError):  # half a pair of surrogates is a TypeError
        return value


def json_text(value: Any) -> str:
    """Arguments as the model wrote them, or as JSON."""
    return value if isinstance(value, str) else json_bytes({} if value is None else value).decode()


def json_value(data: bytes) -> Any:
    """What bytes of JSON hold (else ``ValueError``); half of a pair of surrogates, left where a text was cut, becomes "?"."""
    try:
        return from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError:
        whole = json.dumps(json.loads(data), ensure_ascii=False, allow_nan=False)
        return from_json(whole.encode("utf-8", "replace"), allow_inf_nan=False)


def json_bytes(value: Any) -> bytes:
    """A value as JSON without spaces; a number that is none (``1e999`` was read as infinite) becomes null."""
    return to_json(value, inf_nan_mode="null")
