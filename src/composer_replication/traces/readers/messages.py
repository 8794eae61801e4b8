"""Messages as parts: the one place that knows how chats, Responses, Anthropic's blocks and OpenTelemetry spell text and calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tokens.call_dialects import read_calls
from composer_replication.traces.json_values import arguments_text, at, flag, items, string, text_of
from composer_replication.traces.trace_records import Dropped, Part, Source, StepResult, Thought, TraceBuilder

ROLES: dict[str, Source] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "agent",
    "tool": "user",
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
_ITEMS = _BLOCKS | {"message"}
_CALL_IN_TEXT = "<function="
"""How models without tools are taught to call; what the user says next is the result."""
_INJECTED = ("<environment_context>", "<user_instructions>", "# AGENTS.md", "<permissions", "<skills")
_EXIT_CODE = re.compile(r"(?:Process exited with code|^exit(?:ed with)? code:?) (-?\d+)", re.MULTILINE)


def is_item(value: Any) -> bool:
    """Whether it is a message or an item that stands in the place of one."""
    return at(value, "role") is not None or at(value, "type") in _ITEMS


def add_message(builder: TraceBuilder, message: Any, *flags: str, **known: Any) -> int:
    """Add a message of a chat or an item of Responses, whose answers are spread over items; its place.

    Raises:
        Dropped: it is neither, or its result answers no call.
    """
    role = at(message, "role")
    if not is_item(message) or (role is not None and role not in ROLES):
        kind = f"the role {role!r:.20}" if role is not None else f"the kind {at(message, 'type')!r:.40}"
        raise Dropped(f"a message of {kind}")
    source = ROLES[role] if role is not None else "agent"
    parts = list(parts_of(message))
    text = text_of(message.get("content")) if source == "user" else ""
    if role == "user" and builder.waits() and _CALL_IN_TEXT in builder.trace.steps[-1].text:
        parts = [StepResult("", text.removeprefix("OBSERVATION:").lstrip())]
    if text.startswith(_INJECTED):
        flags = (*flags, "injected")
    return builder.add(source, parts, *flags, key="" if "type" in message else None, **known)


def parts_of(message: dict[str, Any]) -> Iterator[Part]:
    """Texts, thoughts, calls and results of a message, of an item, or of one block."""
    role, kind = message.get("role"), message.get("type")
    if role is None and kind != "message":
        yield from _block(message)
        return
    content = message.get("content", message.get("parts"))
    if role == "tool" and "parts" not in message:
        yield StepResult(string(message.get("tool_call_id")), text_of(content), flag(message.get("is_error")))
        return
    if thought := text_of(message.get("reasoning_content") or message.get("reasoning")):
        yield Thought(thought)
    for block in items(message.get("thinking_blocks")):
        yield Thought("", string(at(block, "signature")))
    calls = 0
    for block in content if isinstance(content, list) else [content]:
        if isinstance(block, dict) and block.get("type") in _BLOCKS:
            yield from _block(block)
        elif text := text_of(block):
            yield text
    for call in items(message.get("tool_calls")):
        if name := string(at(call, "function", "name") or at(call, "name")):
            calls += 1
            arguments = at(call, "function", "arguments") if "function" in call else call.get("arguments")
            yield ToolCall(name, arguments_text(arguments), string(call.get("id")))
    if role == "assistant" and not calls and _CALL_IN_TEXT in (text := text_of(content)):
        yield from read_calls(f"<tool_call>{text[text.index(_CALL_IN_TEXT) :]}</tool_call>", "hermes")


def function_tools(tools: Any) -> list[dict[str, Any]]:
    """Definitions of tools in the form of chat completions, whichever of the forms they have."""
    found = []
    for tool in items(tools):
        own = at(tool, "function") or tool
        if name := string(at(own, "name") or at(own, "title")):
            schemas = (at(own, key) for key in ("parameters", "input_schema"))
            schema = next((each for each in schemas if isinstance(each, dict)), {})
            function = {"name": name, "description": string(at(own, "description")), "parameters": schema}
            found.append({"type": "function", "function": function})
    return found


def exit_code_in(text: str) -> int | None:
    """The exit code that Codex and others write into the text of a result."""
    found = _EXIT_CODE.search(text[:2000])
    return int(found[1]) if found else None


def _block(block: dict[str, Any]) -> Iterator[Part]:
    kind = block.get("type")
    if kind in _THOUGHTS:
        text = text_of(block.get("summary") or block.get("thinking") or block.get("content"))
        sealed = (block.get(key) for key in ("signature", "encrypted_content", "data"))
        yield Thought(text, next(filter(None, map(string, sealed)), ""))
    elif kind in _CALLS:
        yield from _call(block, str(kind))
    elif kind in _RESULTS:
        yield _result(block, str(kind))
    else:
        raise Dropped(f"an item of the kind {kind!r:.40}")


def _call(block: dict[str, Any], kind: str) -> Iterator[Part]:
    own = block.get("function") if isinstance(block.get("function"), dict) else block
    name = string(at(own, "name")) or kind.removesuffix("_call")
    given = next((at(own, key) for key in ("arguments", "input", "action") if at(own, key) is not None), None)
    arguments = arguments_text({"input": given} if kind == "custom_tool_call" else given)
    call_id = string(block.get("call_id")) or string(block.get("id"))
    yield ToolCall(name, arguments, call_id)
    if kind in ("mcp_call", "web_search_call") and block.get("output") is not None:
        yield StepResult(call_id, text_of(block["output"]), block.get("error") is not None)


def _result(block: dict[str, Any], kind: str) -> StepResult:
    keys: Sequence[str] = ("output", "content", "response", "result", "tools")
    content = next((block[key] for key in keys if block.get(key) is not None), None)
    is_whole = kind != "tool_call_response" and not (isinstance(content, dict) and "content" not in content)
    text = text_of(content) if is_whole else content if isinstance(content, str) else arguments_text(content)
    call_id = string(block.get("tool_use_id")) or string(block.get("call_id")) or string(block.get("id"))
    is_error, code = flag(block.get("is_error")), None
    if kind == "tool_result":  # one that does not say that it failed did not
        is_error = bool(is_error)
    if kind.endswith("_output"):
        success, code = flag(at(content, "success")), exit_code_in(text)
        is_error = not success if success is not None else None if code is None else code != 0
    return StepResult(call_id, text, is_error, code)
