"""What a tool works with, how it is described and called, how it refuses, and how long its answer may be.

A signature and its docstring become a JSON schema; a call becomes its arguments, or an error that teaches.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.records import ToolCall, ToolSpec

MAX_FILE_BYTES = 2 * 1024**2
"""Of a file that is read, written, edited or searched."""
_MIN_KEPT = 200


class RefusedError(Exception):
    """The tool does not do it; the text says why and what to do instead, ``fault`` what it is to a hint."""

    def __init__(self, text: str, fault: str = "") -> None:
        super().__init__(text)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class VisibleTests:
    """The tests that ``run_tests`` runs.

    ``files`` are put back before each run: tests, their data and their configuration, as stored. ``is_left_out``
    tells which files of the tree grading will not take from it.
    """

    node_ids: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    import_roots: tuple[str, ...] = (".",)
    options: tuple[str, ...] = ()
    is_left_out: Callable[[str], bool] = field(default=lambda _: False, repr=False, compare=False)


def clip(text: str, max_characters: int, how: str) -> str:
    """``text``, or its beginning and its end with a note between them.

    Whole lines are left out where lines are short enough. The result is at most ``max_characters`` long, a quarter
    of it being the beginning: what commands and tests say last matters most. ``how`` tells, in the note, what to do to see
    the rest. Less than 400 characters are a ``ValueError``: they have no room for it.
    """
    if max_characters < 2 * _MIN_KEPT:
        raise ValueError(f"max_characters must be at least {2 * _MIN_KEPT}, not {max_characters}")
    if len(text) <= max_characters:
        return text
    room = max_characters - len(_note(len(text), text.count("\n") + 1, how))
    head_end = max(room // 4, 0)
    tail_start = len(text) - max(room - head_end, 0)
    before, after = text.rfind("\n", 0, head_end) + 1, text.find("\n", tail_start)
    if head_end - before < _MIN_KEPT:
        head_end = before
    if 0 <= after < tail_start + _MIN_KEPT:
        tail_start = after + 1
    left_out = text[head_end:tail_start]
    note = _note(len(left_out), left_out.count("\n"), how)
    return (text[:head_end] + note + text[tail_start:])[:max_characters]


def _note(num_characters: int, num_lines: int, how: str) -> str:
    return f"\n[... {num_characters} characters, {num_lines} lines left out: {how} ...]\n"


_TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool}
_KINDS = {kind.__name__: name for name, kind in _TYPES.items()}
_ARGUMENT = re.compile(r"^    (\w+): (.*)$", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example: (\{.*\})$", re.MULTILINE)
_MAX_NAME_CHARACTERS = 80


def spec_of(tool: Callable[..., Any]) -> ToolSpec:
    """The tool that a function is: its name, the text before ``Args:``, a schema of its arguments.

    The first parameter, what the tool works with, is not the policy's. The others are of type str, int or bool; those
    without a default are required, each is described in the docstring (Google style, on one line), and no others are taken.
    """
    description, _, listed = (inspect.getdoc(tool) or "").partition("\nArgs:\n")
    texts = dict(_ARGUMENT.findall(listed))
    parameters = list(inspect.signature(tool).parameters.values())[1:]
    properties = {
        each.name: {"type": _KINDS[each.annotation], "description": texts[each.name]} for each in parameters
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [each.name for each in parameters if each.default is inspect.Parameter.empty]:
        schema["required"] = required
    return ToolSpec(tool.__name__, schema | {"additionalProperties": False}, description.strip())


def function_schema(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates, servers and stored trajectories take it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


def arguments_of(call: ToolCall, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, dict[str, Any]]:
    """The tool that is called and its arguments, checked against its schema; whole numbers are integers.

    Raises:
        RefusedError: the call cannot be made: the first thing that is wrong with it, what the tool takes, and a right example.
    """
    by_name = {tool.name: tool for tool in tools}
    spec = by_name.get(call.name)
    if spec is None:
        name = call.name[:_MAX_NAME_CHARACTERS]
        near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.3)
        guess = f" Did you mean {near[0]}?" if near else ""
        problem = f"unknown tool {clean(name)!r}.{guess} The tools are {', '.join(by_name)}."
        raise RefusedError(f"{problem}\n{usage_of(by_name[near[0]] if near else tools[0])}", "invalid")
    try:
        return spec, _checked(call, spec)
    except (ValueError, RecursionError) as error:
        problem = str(error) if isinstance(error, ValueError) else "bad json: nested too deep"
        raise RefusedError(f"{clean(problem)}.\n{usage_of(spec)}", "invalid") from error


def _checked(call: ToolCall, spec: ToolSpec) -> dict[str, Any]:
    """The arguments of a call; the first thing wrong with them is a ``ValueError``, or a ``RecursionError`` of json's own."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        raise ValueError(f"bad json: {str(error)[:200]} in {call.arguments[:120]!r}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"bad json: the arguments are {_short(arguments)}, not an object")  # noqa: TRY004
    properties = spec.parameters["properties"]
    for argument in spec.parameters.get("required", ()):
        if argument not in arguments:
            raise ValueError(f"missing argument: {spec.name} was called without {argument!r}")
    for argument, value in arguments.items():
        if argument not in properties:
            raise ValueError(f"unknown argument: {spec.name} has no argument {argument!r}")
        wanted = properties[argument]["type"]
        if wanted == "integer" and isinstance(value, float) and value.is_integer():  # some models write 3.0
            arguments[argument] = int(value)
        elif type(value) is not _TYPES[wanted]:  # a bool is an int, too
            raise ValueError(f"wrong type: {argument} is {_short(value)}, not of type {wanted}")
    return arguments


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


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


def clean(text: str) -> str:
    """Text of the policy without halves of surrogate pairs, which no encoder takes."""
    return text.encode("utf-8", "backslashreplace").decode()
