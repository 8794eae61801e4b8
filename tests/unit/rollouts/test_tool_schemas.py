"""Schemas from signatures, and calls that cannot be made: each says what was wrong and shows a right one."""

from __future__ import annotations

import json

import pytest
from transformers.utils import get_json_schema

from composer_replication.records import ToolCall, ToolSpec
from composer_replication.rollouts.tools.tool_schemas import (
    BadCallError,
    arguments_of,
    example_of,
    spec_of,
    usage_of,
)
from composer_replication.rollouts.tools.tool_signatures import TOOL_NAMES, ToolSignatures
from composer_replication.rollouts.tools.toolbox import TOOLS


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_schemas_are_those_that_transformers_makes_of_the_same_methods(name: str) -> None:
    theirs = get_json_schema(getattr(ToolSignatures, name))["function"]
    ours = next(tool for tool in TOOLS if tool.name == name)
    theirs["parameters"]["properties"].pop("self", None)
    assert ours.description == theirs["description"]
    assert ours.parameters["properties"] == theirs["parameters"]["properties"]
    assert ours.parameters.get("required", []) == [
        argument for argument in theirs["parameters"].get("required", []) if argument != "self"
    ]
    assert ours.parameters["additionalProperties"] is False


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
        ("bash", "[1]", "bad json: the arguments are an array, not an object"),
        ("bash", "{}", "missing argument: bash was called without 'command'"),
        ("bash", '{"command": "ls", "cwd": "/"}', "unknown argument: bash has no argument 'cwd'"),
        ("bash", "null", "bad json: the arguments are null"),
        ("bash", "[" * 100_000, "bad json"),
        ("bash", '{"command": ["ls"]}', "wrong type: command is an array"),
        ("bash", '{"command": true}', "wrong type: command is a boolean"),
        ("search", '{"pattern": "x", "is_regex": 1}', "wrong type: is_regex is an integer"),
        ("bash", '{"command": "ls", "timeout_seconds": "5"}', "wrong type: timeout_seconds is a string"),
        ("bash", '{"command": "ls", "timeout_seconds": true}', "wrong type: timeout_seconds is a boolean"),
        ("bash", '{"command": "ls", "timeout_seconds": 1.5}', "wrong type: timeout_seconds is a number"),
        ("run_tests", '{"path": "tests"}', "run_tests takes no arguments"),
    ],
)
def test_a_wrong_call_says_what_was_wrong_and_shows_a_right_one(name: str, arguments: str, said: str) -> None:
    with pytest.raises(BadCallError) as caught:
        arguments_of(ToolCall(name, arguments), TOOLS)
    assert said in str(caught.value)
    shown = next(tool for tool in TOOLS if f"\n{tool.name} takes" in str(caught.value))
    assert f"Example: {example_of(shown)}" in str(caught.value)
    str(caught.value).encode()


def test_whole_numbers_are_integers_and_empty_arguments_an_empty_object() -> None:
    _, arguments = arguments_of(ToolCall("bash", '{"command": "ls", "timeout_seconds": 3.0}'), TOOLS)
    assert repr(arguments["timeout_seconds"]) == "3"
    assert arguments_of(ToolCall("submit", ""), TOOLS)[1] == {}


def test_descriptions_of_arguments_are_one_line_and_those_without_a_default_required() -> None:
    def paint(colour: str, times: int, share: float, is_dry: bool, name: str = "") -> str:
        """Paint it.

        Args:
            colour: Of the paint,
                in words.
            times: How often.
            share: How much.
            is_dry: Whether it waits.
            name: Of the painter.
        """
        return ""

    spec = spec_of(paint)
    assert spec.parameters["properties"]["colour"]["description"] == "Of the paint, in words."
    assert spec.parameters["required"] == ["colour", "times", "share", "is_dry"]


def test_a_type_without_schema_and_an_argument_without_description_are_refused() -> None:
    def listed(names: list[str]) -> str:
        """Do.

        Args:
            names: All.
        """
        return ""

    def silent(name: str) -> str:
        """Do."""
        return ""

    for method in (listed, silent):
        with pytest.raises(TypeError, match="needs a type"):
            spec_of(method)
