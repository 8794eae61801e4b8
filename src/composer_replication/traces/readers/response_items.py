"""Items of the Responses format, which Codex, mini-swe-agent and the API's own logs share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.trace_records import (
    StepResult,
    TraceBuilder,
    arguments_text,
    items,
    mapping,
    string,
    text_of,
)

_CALLS = {
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "tool_search_call",
    "web_search_call",
    "mcp_call",
}
_OUTPUTS = {
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "tool_search_output",
}
_EXIT_CODE = re.compile(r"(?:Process exited with code|^exit(?:ed with)? code:?) (-?\d+)", re.MULTILINE)
_INJECTED = ("<environment_context>", "<user_instructions>", "# AGENTS.md", "<permissions", "<skills")


def is_item(value: Any) -> bool:
    """Whether it is one of the items that become a step or a part of one."""
    kind = string(mapping(value).get("type"))
    return kind in _CALLS | _OUTPUTS | {"reasoning", "message"} or "role" in mapping(value)


def add_item(builder: TraceBuilder, item: Mapping[str, Any], timestamp: str = "") -> str:
    """Add one item; why it was dropped, else empty. Items of one answer follow each other."""
    kind = string(item.get("type")) or "message"
    if kind == "message":
        return _add_message(builder, item, timestamp)
    if kind == "reasoning":
        step = builder.answer(timestamp)
        step.reasoning = "\n".join(
            part for part in (step.reasoning, text_of(item.get("summary") or item.get("content"))) if part
        )
        if sealed := string(item.get("encrypted_content")):
            step.sealed.append(sealed)
    elif kind in _CALLS:
        call = _call(item, kind)
        builder.call(builder.answer(timestamp), call)
        if kind in ("mcp_call", "web_search_call") and item.get("output") is not None:
            is_error = item.get("error") is not None
            builder.trace.steps[-1].results.append(
                StepResult(builder.trace.steps[-1].calls[-1].call_id, text_of(item["output"]), is_error)
            )
    elif kind in _OUTPUTS:
        return _add_output(builder, item)
    else:
        return f"an item of the kind {kind!r:.40}"
    return ""


def items_as_messages(given: Any) -> list[dict[str, Any]]:
    """Items as messages of a chat: the items of one answer are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    builder = TraceBuilder(_blank())
    for item in items(given):
        if is_item(item):
            add_item(builder, item)
    messages: list[dict[str, Any]] = []
    for step in builder.trace.steps:
        if step.source != "agent":
            messages.append({"role": step.source, "content": step.text})
            continue
        messages.append(
            {
                "role": "assistant",
                "content": step.text,
                "reasoning_content": step.reasoning,
                "thinking_blocks": [{"signature": each} for each in step.sealed],
                "tool_calls": [
                    {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
                    for call in step.calls
                ],
            }
        )
        messages += [
            {
                "role": "tool",
                "tool_call_id": result.call_id,
                "content": result.text,
                "is_error": result.is_error,
            }
            for result in step.results
        ]
    return messages


def exit_code_in(text: str) -> int | None:
    """The exit code that Codex and others write into the text of a result."""
    found = _EXIT_CODE.search(text[:2000])
    return int(found[1]) if found else None


def _add_message(builder: TraceBuilder, item: Mapping[str, Any], timestamp: str) -> str:
    role, text = string(item.get("role")), text_of(item.get("content"))
    if role == "assistant":
        step = builder.answer(timestamp)
        step.text = f"{step.text}\n{text}" if step.text else text
    elif role in ("system", "developer"):
        builder.message("system", text, timestamp=timestamp)
    elif role == "user":
        builder.message(
            "user", text, *(("injected",) if text.startswith(_INJECTED) else ()), timestamp=timestamp
        )
    else:
        return f"a message of the role {role!r:.20}"
    return ""


def _add_output(builder: TraceBuilder, item: Mapping[str, Any]) -> str:
    output = item.get("output", item.get("tools"))
    success = mapping(output).get("success")
    text = text_of(output) if not isinstance(output, Mapping) or "content" in output else text_of([output])
    code = exit_code_in(text)
    is_error = (not success) if isinstance(success, bool) else (None if code is None else code != 0)
    return builder.result(StepResult(string(item.get("call_id")), text, is_error, code))


def _call(item: Mapping[str, Any], kind: str) -> ToolCall:
    name = string(item.get("name")) or kind.removesuffix("_call")
    if kind == "custom_tool_call":
        arguments = arguments_text({"input": item.get("input")})
    else:
        arguments = arguments_text(item.get("arguments", item.get("action")))
    return ToolCall(name, arguments, string(item.get("call_id")) or string(item.get("id")))


def _blank() -> Any:
    from composer_replication.traces.trace_records import Trace

    return Trace("", "")
