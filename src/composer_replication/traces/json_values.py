"""Values of foreign JSON, which may hold anything anywhere: read without an exception."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json, to_json


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
