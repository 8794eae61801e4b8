"""Messages as parts: the one place that knows how chats, Responses, Anthropic's blocks and OpenTelemetry spell text and calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tokens.call_dialects import read_calls
from composer_replication.traces.json_values import at, items_at, json_text, text_at, text_of, typed
from composer_replication.traces.trace_records import Dropped, Part, Source, StepResult, Thought, TraceBuilder

ROLES: dict[str, Source] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "agent", "tool": "user",
}  # fmt: skip
_CALLS = {
    "tool_use", "server_tool_use", "tool_call", "function", "function_call", "custom_tool_call", "local_shell_call",
    "tool_search_call", "web_search_call", "mcp_call",
}  # fmt: skip
_RESULTS = {
    "tool_result", "tool_call_response", "function_call_output", "custom_tool_call_output", "local_shell_call_output",
    "tool_search_output",
}  # fmt: skip
_THOUGHTS = {"reasoning", "thinking", "redacted_thinking"}
_BLOCKS = _CALLS | _RESULTS | _THOUGHTS
_CALL_IN_TEXT = "<function="
"""How models without tools are taught to call; what the user says next is the result."""
_INJECTED = ("<environment_context>", "<user_instructions>", "# AGENTS.md", "<permissions", "<skills")
_EXIT_CODE = re.compile(r"(?:Process exited with code|^exit(?:ed with)? code:?) (-?\d+)", re.MULTILINE)


def is_item(value: Any) -> bool:
    """Whether it is a message or an item that stands in the place of one."""
    kind = at(value, "type")
    return at(value, "role") is not None or kind == "message" or kind in _BLOCKS


def add_message(builder: TraceBuilder, message: Any, *flags: str, **known: Any) -> int:
    """Add a message of a chat or an item of Responses, whose answers are spread over items; its place.

    Raises:
        Dropped: it is neither, or its result answers no call.
    """
    role = at(message, "role")
    if role is not None and role not in ROLES:
        raise Dropped(f"a message of the role {role!r:.20}")
    if not is_item(message):
        raise Dropped(f"a message of the kind {at(message, 'type')!r:.40}")
    source = "agent" if role is None else ROLES[role]
    parts = list(parts_of(message))
    text = text_of(message.get("content")) if source == "user" else ""
    if role == "user" and builder.waits and _CALL_IN_TEXT in builder.trace.steps[-1].text:
        parts = [StepResult("", text.removeprefix("OBSERVATION:").lstrip())]
    if text.startswith(_INJECTED):
        flags = (*flags, "injected")
    return builder.add(source, parts, *flags, key="" if "type" in message else None, **known)


def parts_of(message: dict[str, Any]) -> Iterator[Part]:
    """Texts, thoughts, calls and results of a message, of an item, or of one block."""
    role = message.get("role")
    if role is None and message.get("type") != "message":
        yield from _block(message)
        return
    content = message.get("content", message.get("parts"))
    if role == "tool" and "parts" not in message:
        error = typed(bool, message.get("is_error"))
        yield StepResult(text_at(message, "tool_call_id"), text_of(content), error)
        return
    if thought := text_of(message.get("reasoning_content") or message.get("reasoning")):
        yield Thought(thought)
    yield from content_parts(content)
    calls = [part for call in items_at(message, "tool_calls") for part in _call(call, "") if call]
    yield from calls
    if role == "assistant" and not calls and _CALL_IN_TEXT in (text := text_of(content)):
        yield from read_calls(f"<tool_call>{text[text.index(_CALL_IN_TEXT) :]}</tool_call>", "hermes")


def content_parts(content: Any) -> Iterator[Part]:
    """The parts of a content: a text, or blocks."""
    for block in content if isinstance(content, list) else [content]:
        if isinstance(block, dict) and block.get("type") in _BLOCKS:
            yield from _block(block)
        elif text := text_of(block):
            yield text


def function_tools(tools: Any) -> list[dict[str, Any]]:
    """Definitions of tools in the form of chat completions, whichever of the forms they have."""
    found = []
    for tool in tools if isinstance(tools, list) else ():
        own = at(tool, "function") or tool
        if name := text_at(own, "name") or text_at(own, "title"):
            schemas = (at(own, key) for key in ("parameters", "input_schema"))
            schema = next((each for each in schemas if isinstance(each, dict)), {})
            function = {"name": name, "description": text_at(own, "description"), "parameters": schema}
            found.append({"type": "function", "function": function})
    return found


def exit_code_in(text: str) -> int | None:
    """The exit code that Codex and others write into the text of a result."""
    found = _EXIT_CODE.search(text[:2000])
    return int(found[1]) if found else None


def _block(block: dict[str, Any]) -> Iterator[Part]:
    kind = block.get("type")
    if kind in _THOUGHTS:
        yield Thought(text_of(block.get("summary") or block.get("thinking") or block.get("content")))
    elif kind in _CALLS:
        yield from _call(block, str(kind))
    elif kind in _RESULTS:
        yield _result(block, str(kind))
    else:
        raise Dropped(f"an item of the kind {kind!r:.40}")


def _call(block: dict[str, Any], kind: str) -> Iterator[Part]:
    own = block.get("function") if isinstance(block.get("function"), dict) else block
    name = text_at(own, "name") or kind.removesuffix("_call")
    given = next((at(own, key) for key in ("arguments", "input", "action") if at(own, key) is not None), None)
    arguments = json_text({"input": given} if kind == "custom_tool_call" else given)
    call_id = text_at(block, "call_id") or text_at(block, "id")
    if name:
        yield ToolCall(name, arguments, call_id)
    if kind in ("mcp_call", "web_search_call") and block.get("output") is not None:
        yield StepResult(call_id, text_of(block["output"]), block.get("error") is not None)


def _result(block: dict[str, Any], kind: str) -> StepResult:
    keys = ("output", "content", "response", "result", "tools")
    content = next((block[key] for key in keys if block.get(key) is not None), None)
    is_whole = kind != "tool_call_response" and not (isinstance(content, dict) and "content" not in content)
    text = text_of(content) if is_whole else json_text(content)
    call_id = text_at(block, "tool_use_id") or text_at(block, "call_id") or text_at(block, "id")
    is_error, code = typed(bool, block.get("is_error")), None
    if kind == "tool_result":  # one that does not say that it failed did not
        is_error = bool(is_error)
    if kind.endswith("_output"):
        success, code = typed(bool, at(content, "success")), exit_code_in(text)
        is_error = not success if success is not None else None if code is None else code != 0
    return StepResult(call_id, text, is_error, code)
