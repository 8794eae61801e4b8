"""What calls are read from: JSON, text up to a sign, pairs between tags. A piece costs its own length and no more.

Nothing raises for what a model wrote, but ``RecursionError`` for JSON that is nested too deeply to be compared or written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from composer_replication.records import ToolCall

_JSON = json.JSONDecoder()
BAD_JSON = (ValueError, RecursionError)
_FIRST_PIECE = 1024
_LONGEST_SIGN = 12
"""Characters by which a piece of JSON may be cut within one sign: ``-Infinity``, an escape, the end of a number."""
_BLANKS = re.compile(r"\s*")
_NAME_IN_RAW = re.compile(r'"name"\s*:\s*"([^"\\]{1,200})"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def object_at(text: str, place: int) -> tuple[dict[str, Any], int, int] | None:
    """The JSON object that begins there behind blanks: it, where it begins and where it ends."""
    begin = behind_blanks(text, place)
    if not text.startswith("{", begin):
        return None
    try:
        value, stop = json_at(text, begin)
    except BAD_JSON:
        return None
    return value, begin, stop


def json_at(text: str, place: int) -> tuple[Any, int]:
    """The JSON that begins at a place, and where it ends.

    An error of the reader counts the lines of all that stands before it, so that it is given a piece, and a longer one
    where the end of the piece may have been the mistake.
    """
    size = _FIRST_PIECE
    while True:
        piece = text[place : place + size]
        is_rest = place + size >= len(text)
        try:
            value, stop = _JSON.raw_decode(piece, 0)
        except json.JSONDecodeError as error:
            if is_rest or (
                error.pos <= len(piece) - _LONGEST_SIGN and not error.msg.startswith("Unterminated")
            ):
                raise
        else:
            if is_rest or stop <= len(piece) - _LONGEST_SIGN:
                return value, place + stop
        size *= 4


def behind_blanks(text: str, place: int) -> int:
    """The nearest place that is no blank."""
    blanks = _BLANKS.match(text, place)
    return blanks.end() if blanks else place


def until(text: str, place: int, *ends: str) -> tuple[str, int]:
    """The text up to the nearest end, and the place behind that end.

    All ends are sought at once: one that never comes would be sought to the end of the text for each call.
    """
    found = re.compile("|".join(map(re.escape, ends))).search(text, place)
    return (text[place : found.start()], found.end()) if found else (text[place:], len(text))


def pairs_between(text: str, begin: str, middle: str, end: str) -> dict[str, str] | None:
    """Keys and values between tags; None where a tag is missing."""
    pairs, place = {}, 0
    while (at := text.find(begin, place)) >= 0:
        value_at = text.find(middle, at)
        stop = text.find(end, value_at) if value_at >= 0 else -1
        if stop < 0:
            return None
        key = text[at + len(begin) : value_at].strip().removesuffix("</arg_key>")
        pairs[key] = text[value_at + len(middle) : stop]
        place = stop + len(end)
    return pairs


def call_of_pairs(
    properties: Mapping[str, Mapping[str, Any]], name: str, pairs: Mapping[str, str] | None, body: str
) -> ToolCall:
    """The call of keys and values between tags; ``properties`` are schemas by tool, which say what values are JSON."""
    name = name.strip()
    if pairs is None:
        return make_call(name, body)
    is_xml, known = "<function=" in body, properties.get(name, {})
    arguments = {}
    for key, text in pairs.items():
        value = text.removeprefix("\n").removesuffix("\n") if is_xml else text
        arguments[key] = _value(value, known.get(key, {}).get("type", "string"))
    return make_call(name, json.dumps(arguments))


def calls_of(value: object, raw: str) -> tuple[ToolCall, ...]:
    """The call that a JSON value is: ``name`` beside ``arguments`` or ``parameters``, perhaps within ``function``."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        inner = value["function"]
        value = {**inner, "id": value.get("id", inner.get("id"))}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return (raw_call(raw),)
    call_id = value.get("id")
    arguments = value.get("arguments", value.get("parameters", {}))
    return (
        make_call(
            value["name"],
            arguments if isinstance(arguments, str) else _as_written(raw, arguments),
            call_id if isinstance(call_id, str) else "",
        ),
    )


def _as_written(raw: str, arguments: object) -> str:
    """The arguments in the policy's own spelling."""
    for found in _ARGUMENTS.finditer(raw):
        try:
            value, stop = json_at(raw, found.end())
        except BAD_JSON:
            continue
        if value == arguments and type(value) is type(arguments):
            return raw[found.end() : stop]
    return json.dumps(arguments)


def raw_call(body: str) -> ToolCall:
    """What is meant as a call and is none."""
    named = _NAME_IN_RAW.search(body)
    return make_call(named[1] if named else "", body.strip())


def make_call(name: str, arguments: str, call_id: str = "") -> ToolCall:
    """Half of a surrogate pair may stand in JSON, but in no text that is stored."""
    name, arguments, call_id = (
        part.encode("utf-8", "replace").decode("utf-8") for part in (name.strip(), arguments, call_id)
    )
    return ToolCall(name, arguments, call_id)


def _value(text: str, kind: object) -> object:
    """An argument between tags: JSON unless the schema takes text; the text itself where it is none."""
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    try:
        return json.loads(text)
    except BAD_JSON:
        return text
