"""Schemas from signatures, and calls that cannot be made: each says what was wrong and shows a right one."""

from __future__ import annotations

import json

import pytest

from composer_replication.records import ToolCall, ToolSpec
from composer_replication.rollouts.tools.tool_context import (
    RefusedError,
    arguments_of,
    example_of,
    spec_of,
    usage_of,
)
from composer_replication.rollouts.tools.toolbox import TOOLS


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_the_example_of_each_tool_is_a_right_call(tool: ToolSpec) -> None:
    call = ToolCall(tool.name, example_of(tool))
    assert arguments_of(call, TOOLS) == (tool, json.loads(example_of(tool)))
    assert example_of(tool) in usage_of(tool)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("run_bash", "{}", "unknown tool 'run_bash'. Did you mean bash?"),
        ("\ud800", "{}", r"unknown tool '\\ud800'"),
        ("bash", "ls -la", "bad json"),
        ("bash", "[1]", "bad json: the arguments are [1], not an object"),
        ("bash", "{}", "missing argument: bash was called without 'command'"),
        ("bash", '{"command": "ls", "cwd": "/"}', "unknown argument: bash has no argument 'cwd'"),
        ("bash", "null", "bad json: the arguments are null"),
        ("bash", "[" * 100_000, "bad json"),
        ("bash", '{"command": ["ls"]}', 'wrong type: command is ["ls"], not of type string'),
        ("bash", '{"command": true}', "wrong type: command is true"),
        ("search", '{"pattern": "x", "is_regex": 1}', "wrong type: is_regex is 1"),
        ("bash", '{"command": "ls", "timeout_seconds": "5"}', 'wrong type: timeout_seconds is "5"'),
        ("bash", '{"command": "ls", "timeout_seconds": true}', "wrong type: timeout_seconds is true"),
        ("bash", '{"command": "ls", "timeout_seconds": 1.5}', "wrong type: timeout_seconds is 1.5"),
        ("run_tests", '{"path": "tests"}', "run_tests takes no arguments"),
    ],
)
def test_a_wrong_call_says_what_was_wrong_and_shows_a_right_one(name: str, arguments: str, said: str) -> None:
    with pytest.raises(RefusedError) as caught:
        arguments_of(ToolCall(name, arguments), TOOLS)
    assert caught.value.fault == "invalid"
    assert said in str(caught.value)
    shown = next(tool for tool in TOOLS if f"\n{tool.name} takes" in str(caught.value))
    assert f"Example: {example_of(shown)}" in str(caught.value)
    str(caught.value).encode()


def test_json_of_any_depth_is_a_fault_and_no_traceback() -> None:
    """At some depth Python can still read a value and no longer write it; where, its own stack decides."""
    for depth in (*range(700, 1000), 5000):
        call = ToolCall("bash", f'{{"command": {"[" * depth}{"]" * depth}}}')
        with pytest.raises(RefusedError, match=r"wrong type|bad json"):
            arguments_of(call, TOOLS)


def test_whole_numbers_are_integers_and_empty_arguments_an_empty_object() -> None:
    _, arguments = arguments_of(ToolCall("bash", '{"command": "ls", "timeout_seconds": 3.0}'), TOOLS)
    assert repr(arguments["timeout_seconds"]) == "3"
    assert arguments_of(ToolCall("submit", ""), TOOLS)[1] == {}


def test_arguments_without_a_default_are_required_and_what_a_tool_works_with_is_none() -> None:
    def paint(box: object, colour: str, times: int, is_dry: bool, name: str = "") -> str:
        """Paint it.

        Args:
            colour: Of the paint.
            times: How often.
            is_dry: Whether it waits.
            name: Of the painter.
        """
        return ""

    spec = spec_of(paint)
    assert list(spec.parameters["properties"]) == ["colour", "times", "is_dry", "name"]
    assert spec.parameters["properties"]["times"] == {"type": "integer", "description": "How often."}
    assert spec.parameters["required"] == ["colour", "times", "is_dry"]
