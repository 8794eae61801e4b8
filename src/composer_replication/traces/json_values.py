"""Values of foreign JSON, which may hold anything anywhere."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

_T = TypeVar("_T")


def text_of(value: Any) -> str:
    """Text of a content that is text, a part or a list of parts; what is no text is named in its place."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(part for part in map(text_of, value) if part)
    if isinstance(value, dict):
        for key in ("text", "content", "refusal", "output", "error"):
            if isinstance(value.get(key), str | list):
                return text_of(value[key])
        kind = value.get("type", " ".join(value))
        return f"[{kind}]" if kind and isinstance(kind, str) and kind not in ("thinking", "reasoning") else ""
    return "" if value is None else str(value)


def at(value: Any, *path: str) -> Any:
    """What stands at the end of a path of keys, "0" for the first of a list or a text; None where it breaks off."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = value[0] if key == "0" and value and isinstance(value, list | str) else None
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
    known = value if isinstance(value, dict) else {}
    return next((known[key] for key in keys if known.get(key) is not None), None)


def first_text(value: Any, *keys: str) -> str:
    """The text at the first of these keys that has one; an empty one where none has."""
    known = value if isinstance(value, dict) else {}
    return next((found for key in keys if isinstance(found := known.get(key), str) and found), "")


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
