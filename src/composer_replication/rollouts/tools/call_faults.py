"""What is wrong with a tool call as it was written, before anything ran: name, JSON, arguments by schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_replication.records import ToolCall, ToolSpec

Finding = tuple[str, str, str]
"""Kind, evidence, subject."""

_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: (
        (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
        and not isinstance(value, bool)
    ),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def call_fault(call: ToolCall, tools: Sequence[ToolSpec]) -> Finding | None:
    """The first thing wrong with a call, or None. Without a list of tools only the JSON is looked at.

    Of the schema, ``required``, ``additionalProperties: false``, ``type``, ``enum`` and ``anyOf`` are read at the
    first level of the arguments; what is said deeper, or in other words, never makes a call wrong here.
    """
    spec = next((tool for tool in tools if tool.name == call.name), None)
    if tools and spec is None:
        return "unknown-tool", f"called {call.name!r}", call.name
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return "bad-json", f"{str(error)[:200]} in {call.arguments[:120]!r}", call.name
    if not isinstance(arguments, dict):
        return "bad-json", f"the arguments are {_name(arguments)}, not an object", call.name
    return _argument_fault(call.name, arguments, spec.parameters) if spec is not None else None


def _argument_fault(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> Finding | None:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    for argument in required if isinstance(required, Sequence) else ():
        if argument not in arguments:
            return "missing-argument", f"{name} was called without {argument!r}", str(argument)
    for argument, value in arguments.items():
        if argument not in properties:
            if schema.get("additionalProperties") is False:
                return "unknown-argument", f"{name} has no argument {argument!r}", argument
            continue
        wanted = _mismatch(value, properties[argument])
        if wanted:
            return "wrong-type", f"{argument} is {_name(value)} ({_short(value)}), not {wanted}", argument
    return None


def _mismatch(value: Any, schema: Any) -> str:
    """What the schema wants instead of the value; empty when it fits or when the schema says nothing known."""
    if not isinstance(schema, Mapping):
        return ""
    for several in ("anyOf", "oneOf"):
        branches = schema.get(several)
        if isinstance(branches, list) and branches:
            wanted = [_mismatch(value, branch) for branch in branches]
            return " or ".join(dict.fromkeys(wanted)) if all(wanted) else ""
    enum = schema.get("enum")
    if isinstance(enum, list) and enum:
        return "" if value in enum else "one of " + ", ".join(_short(each) for each in enum[:8])
    kinds = schema.get("type")
    names = [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    if not names or any(name not in _TYPES for name in names):
        return ""
    if schema.get("nullable") is True:
        names.append("null")
    return "" if any(_TYPES[name](value) for name in names) else " or ".join(names)


def _name(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array"}
    return names.get(type(value), "null" if value is None else "an object")


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # it can be nested deeply enough to be read and not to be written
        return "nested too deep"
    return text if len(text) <= 60 else f"{text[:57]}..."
