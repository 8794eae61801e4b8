"""Messages of the chat format as steps: the form that many logs share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tokens.call_dialects import read_calls
from composer_replication.traces.trace_records import (
    StepResult,
    TraceBuilder,
    TraceStep,
    arguments_text,
    has_image,
    items,
    mapping,
    string,
    text_of,
)

_CALL_IN_TEXT = "<function="
"""How models without tools are taught to call; what the user says next is the result."""


def add_message(builder: TraceBuilder, message: Any, *flags: str) -> str:
    """Add one message of a chat; why it was dropped, else empty.

    Roles are those of chat completions; ``developer`` is a system message, ``function`` a result.
    """
    if not isinstance(message, Mapping):
        return "a message that is no object"
    role, content = string(message.get("role")), message.get("content")
    if has_image(content):
        flags = (*flags, "injected") if role != "user" else flags
    if role in ("system", "developer"):
        builder.message("system", text_of(content), *flags)
    elif role == "user":
        text = text_of(content)
        if _waits(builder):
            return builder.result(StepResult("", text.removeprefix("OBSERVATION:").lstrip()))
        builder.message("user", text, *flags)
    elif role in ("tool", "function"):
        return builder.result(
            StepResult(string(message.get("tool_call_id")), text_of(content), message.get("is_error"))
        )
    elif role in ("assistant", "model"):
        builder.open = None
        step = builder.answer()
        step.text = text_of(content)
        step.flags |= set(flags)
        fill_answer(builder, step, message)
        if not step.calls and _CALL_IN_TEXT in step.text:
            for call in read_calls(
                f"<tool_call>{step.text[step.text.index(_CALL_IN_TEXT) :]}</tool_call>", "hermes"
            ):
                builder.call(step, call)
    else:
        return f"a message of the role {role!r:.20}"
    return ""


def _waits(builder: TraceBuilder) -> bool:
    """Whether the last step is an answer that calls in its text and has no result yet."""
    last = builder.trace.steps[-1] if builder.trace.steps else None
    return last is not None and bool(last.calls) and not last.results and _CALL_IN_TEXT in last.text


def fill_answer(builder: TraceBuilder, step: TraceStep, message: Mapping[str, Any]) -> None:
    """Thoughts and calls of an assistant's message."""
    step.reasoning = text_of(message.get("reasoning_content") or message.get("reasoning"))
    for block in items(message.get("thinking_blocks")):
        if signature := string(mapping(block).get("signature")):
            step.sealed.append(signature)
    for each in items(message.get("tool_calls")):
        function = mapping(mapping(each).get("function"))
        if name := string(function.get("name")):
            call = ToolCall(name, arguments_text(function.get("arguments")), string(mapping(each).get("id")))
            builder.call(step, call)
    old = mapping(message.get("function_call"))
    if name := string(old.get("name")):
        builder.call(step, ToolCall(name, arguments_text(old.get("arguments"))))


def usage_of(usage: Any) -> dict[str, int]:
    """Token counts under ATIF's names, from the names of the providers; cached tokens are part of the prompt."""
    found = mapping(usage)
    names = {
        "prompt_tokens": ("prompt_tokens", "input_tokens"),
        "completion_tokens": ("completion_tokens", "output_tokens"),
        "cached_tokens": ("cached_input_tokens", "cache_read_input_tokens", "cached_tokens"),
    }
    counts = {}
    for ours, theirs in names.items():
        values = [found[name] for name in theirs if type(found.get(name)) is int]
        if values:
            counts[ours] = values[0]
    details = mapping(found.get("prompt_tokens_details") or found.get("input_tokens_details"))
    if "cached_tokens" not in counts and type(details.get("cached_tokens")) is int:
        counts["cached_tokens"] = details["cached_tokens"]
    return counts


def function_tools(tools: Any) -> list[dict[str, Any]]:
    """Definitions of tools in the form of chat completions, whichever of the two forms they have."""
    found = []
    for tool in map(mapping, items(tools)):
        function = mapping(tool.get("function")) or tool
        if name := string(function.get("name")):
            schema = mapping(function.get("parameters") or function.get("input_schema"))
            description = string(function.get("description"))
            found.append(
                {
                    "type": "function",
                    "function": {"name": name, "description": description, "parameters": dict(schema)},
                }
            )
    return found
