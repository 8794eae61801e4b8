"""From a signature and its docstring to a JSON schema, and from a call to its arguments or an error that teaches."""

from __future__ import annotations

import difflib
import inspect
import json
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from composer_replication.records import ToolCall, ToolSpec

_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ARGUMENT = re.compile(r"    (\w+):\s*(.*)")
_EXAMPLE = re.compile(r"^Example: (\{.*\})$", re.MULTILINE)
_MAX_NAME_CHARACTERS = 80


def _checked(call: ToolCall, spec: ToolSpec) -> dict[str, Any]:
    """The arguments of a call; the first thing wrong with them is a ``BadCallError``."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise BadCallError(f"bad json: {str(error)[:200]} in {call.arguments[:120]!r}") from error
    if not isinstance(arguments, dict):
        raise BadCallError(f"bad json: the arguments are {_name(arguments)}, not an object")
    properties = spec.parameters["properties"]
    for argument in spec.parameters.get("required", ()):
        if argument not in arguments:
            raise BadCallError(f"missing argument: {spec.name} was called without {argument!r}")
    for argument, value in arguments.items():
        if argument not in properties:
            raise BadCallError(f"unknown argument: {spec.name} has no argument {argument!r}")
        wanted = properties[argument]["type"]
        if not _fits(value, wanted):
            raise BadCallError(f"wrong type: {argument} is {_name(value)} ({_short(value)}), not {wanted}")
        if wanted == "integer":
            arguments[argument] = int(value)
    return arguments


def _fits(value: Any, wanted: str) -> bool:
    if isinstance(value, bool) or wanted == "boolean":
        return isinstance(value, bool) and wanted == "boolean"
    if wanted == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, str if wanted == "string" else int | float)


def _name(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array"}
    return names.get(type(value), "null" if value is None else "an object")


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:  # it can be nested deeply enough to be read and not to be written
        return "nested too deep"
    return text if len(text) <= 60 else f"{text[:57]}..."


class BadCallError(Exception):
    """A call that cannot be made; the text says what was wrong, what the tool takes and one right example."""


def spec_of(method: Callable[..., Any]) -> ToolSpec:
    """The tool that a method is: its name, the text before ``Args:``, a schema of its arguments.

    Arguments are of type str, int, float or bool; those without a default are required, each is described in the
    docstring (Google style), and no others are taken.
    """
    description, texts = _read_docstring(inspect.getdoc(method) or "")
    hints = typing.get_type_hints(method)
    properties: dict[str, dict[str, str]] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(method).parameters.items():
        if name == "self":
            continue
        if hints.get(name) not in _KINDS or name not in texts:
            raise TypeError(f"{method.__name__}: {name} needs a type of {_KINDS} and a description")
        properties[name] = {"type": _KINDS[hints[name]], "description": texts[name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return ToolSpec(method.__name__, schema | {"additionalProperties": False}, description)


def function_schema(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates, servers and stored trajectories take it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and the text of each argument on one line."""
    head, _, tail = text.partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in tail.splitlines():
        if not line.startswith("    "):
            break
        if match := _ARGUMENT.fullmatch(line):
            name, found[match[1]] = match[1], match[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}"
    return head.strip(), found


def arguments_of(call: ToolCall, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, dict[str, Any]]:
    """The tool that is called and its arguments, checked against its schema; whole numbers are integers."""
    spec = next((tool for tool in tools if tool.name == call.name), None)
    if spec is None:
        raise BadCallError(_unknown_tool(call.name[:_MAX_NAME_CHARACTERS], tools))
    try:
        return spec, _checked(call, spec)
    except BadCallError as error:
        raise BadCallError(f"{_clean(str(error))}.\n{usage_of(spec)}") from error


def usage_of(spec: ToolSpec) -> str:
    """What a tool takes, and one right call of it."""
    required = spec.parameters.get("required", ())
    parts = [
        f"{name} ({entry['type']}{'' if name in required else ', optional'})"
        for name, entry in spec.parameters["properties"].items()
    ]
    takes = f"{spec.name} takes {', '.join(parts) or 'no arguments'}, as one JSON object."
    return f"{takes}\nExample: {example_of(spec)}"


def example_of(spec: ToolSpec) -> str:
    """The arguments of one right call, as JSON: they stand in its description."""
    found = _EXAMPLE.search(spec.description)
    return found[1] if found else "{}"


def _unknown_tool(name: str, tools: Sequence[ToolSpec]) -> str:
    names = [tool.name for tool in tools]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
    shown = next(tool for tool in tools if tool.name == (near[0] if near else names[0]))
    guess = f"Did you mean {near[0]}? " if near else ""
    return f"unknown tool {_clean(name)!r}. {guess}The tools are {', '.join(names)}.\n{usage_of(shown)}"


def _clean(text: str) -> str:
    """Text of the policy without halves of surrogate pairs, which no encoder takes."""
    return text.encode("utf-8", "backslashreplace").decode()
