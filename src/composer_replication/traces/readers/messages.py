"""Messages however chats, Responses, Anthropic's blocks and OpenTelemetry spell them, and the logs that consist of them.

Logs of chat completions and of Responses, and spans of OpenTelemetry's GenAI conventions from 1.37 on (OTLP JSON): each row and each
chat span repeats its history, and those that do become one conversation. Messages are opt-in in spans: one without them is counted.
Results come from the spans of the tools, and where these alone were recorded, their calls are the session.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tokens.call_dialects import read_calls
from composer_replication.traces.json_values import at, items_at, json_text, parsed, text_at, text_of, typed
from composer_replication.traces.trace_records import (
    Dropped,
    Ledger,
    Part,
    RepositoryState,
    Source,
    StepResult,
    Thought,
    Trace,
    TraceBuilder,
)

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
    yield from (Thought("", text_at(each, "signature")) for each in items_at(message, "thinking_blocks"))
    yield from content_parts(content)
    given = (call for call in items_at(message, "tool_calls") if isinstance(call, dict))
    calls = [part for call in given for part in _call(call, "")]
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
        text = text_of(block.get("summary") or block.get("thinking") or block.get("content"))
        sealed = (text_at(block, key) for key in ("signature", "encrypted_content", "data"))
        yield Thought(text, next(filter(None, sealed), ""))
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


# ------------------------------------------------------------------------------ logs


def matches_chat(head: Sequence[Any]) -> str:
    """The version where it is a log of chat completions: rows with messages, or pairs of request and response."""
    first = head[0]
    if not isinstance(first, dict) or {"info", "trajectory_format"} & first.keys() or not _messages(first):
        return ""
    return "completions" if first.get("response") is not None else "rows"


def matches_responses(head: Sequence[Any]) -> str:
    """Likewise for Responses, which take ``input``."""
    request = _request(head[0])
    return "responses" if isinstance(at(request, "input"), list | str) and at(request, "model") else ""


def read_requests(kind: str, records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of rows ``{messages, …}``, ``{request, response}``, ``{messages, response}``, or with ``input`` (Responses)."""
    joined = ConversationJoiner(kind, name)
    for record in records:
        ledger.put(partial(_row, joined), record)
    yield from (builder.trace for builder in joined.builders)


class ConversationJoiner:
    """Conversations by the digest of everything that they hold so far, so that a row extends the one that it repeats."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self._name = kind, name
        self.builders: list[TraceBuilder] = []
        self._tips: dict[bytes, TraceBuilder] = {}

    def add(self, messages: Sequence[Any], answers: Sequence[Any], tools: Any, model: Any) -> Trace:
        """Add a row: the messages that were sent, and those that came back."""
        chain = _digests([*messages, *answers])
        known = next((n for n in range(len(messages), 0, -1) if chain[n - 1] in self._tips), 0)
        while known > 1 and chain[known - 2] == chain[known - 1]:
            known -= 1  # thoughts have no digest of their own
        if known:
            builder = self._tips.pop(chain[known - 1])
        else:
            builder = TraceBuilder(Trace(f"{self._name}#{len(self.builders)}", self.kind))
            self.builders.append(builder)
        builder.trace.tools = function_tools(tools) or builder.trace.tools
        for message in messages[known:]:
            _add(builder, message)
        builder.close()
        for answer in answers:
            _add(builder, answer, model=model)
        builder.trace.model = builder.trace.model or (typed(str, model) or "")
        if len(chain) > known:
            self._tips[chain[-1]] = builder
        return builder.trace


def _row(joined: ConversationJoiner, row: dict[str, Any]) -> None:
    request, body = _request(row), _body(row.get("response"))
    of_responses = (
        request if joined.kind == "openai-responses" else {}
    )  # other rows have keys of these names, too
    given, instructions = at(of_responses, "input"), text_at(of_responses, "instructions")
    if at(of_responses, "previous_response_id"):
        raise Dropped("its context is stored at the provider (previous_response_id)")
    messages = items_at(of_responses, "input") or _messages(row)
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    if not messages:
        raise Dropped("a row without messages")
    if instructions:
        messages = [{"role": "system", "content": instructions}, *messages]
    answers = items_at(body, "output") or [at(each, "message") for each in items_at(body, "choices")[:1]]
    tools = at(request, "tools") or at(row, "kwargs", "tools")
    trace = joined.add(messages, answers, tools, text_at(body, "model") or at(request, "model"))
    if task := text_at(row, "instance_id"):  # of SWE-bench, beside the messages
        trace.state = RepositoryState(task_id=task)
        trace.passed = typed(bool, row.get("resolved"))


def _add(builder: TraceBuilder, message: Any, **known: Any) -> None:
    """What cannot be added leaves the row's other messages where they are."""
    with suppress(Dropped, AttributeError, TypeError, ValueError):
        add_message(builder, message, **known)


def _digests(messages: Sequence[Any]) -> list[bytes]:
    """For each message the digest of all up to it: source, texts and calls, however they are spelled; thoughts may be left out."""
    digests, before = [], b""
    for message in messages:
        known = list(parts_of(message)) if is_item(message) else []
        # a call of the server's own tool has result and sources in the answer, and loses them where it is repeated
        is_own = any(isinstance(part, ToolCall) for part in known)
        parts = [_plain(part) for part in known if not (is_own and isinstance(part, StepResult))]
        if at(message, "type") == "web_search_call":
            parts = [message["type"]]
        if any(parts):
            is_given = message.get("role") in ("user", "system", "developer")
            before += json.dumps([is_given, *filter(None, parts)]).encode()
            before = hashlib.sha256(before).digest()
        digests.append(before)
    return digests


def _plain(part: Any) -> Any:
    if isinstance(part, ToolCall):
        return [part.name, json.dumps(parsed(part.arguments), sort_keys=True)]
    return part.text if isinstance(part, StepResult) else part if isinstance(part, str) else None


def _request(row: Any) -> Any:
    """The request of a row, whether it stands in it, beside a response or in a batch."""
    request = at(row, "request") or row
    body = parsed(at(request, "body"))
    return body if isinstance(body, dict) else request


def _messages(row: Any) -> list[Any]:
    """Of the request of a row; none where one of them is none."""
    messages = items_at(_request(row), "messages")
    return messages if all(at(each, "role") is not None for each in messages) else []


def _body(response: Any) -> Any:
    """The response's object; of a stream of events the one that completes it."""
    body = parsed(at(response, "body") or response)
    if not isinstance(body, str):
        return body
    events = (parsed(line[5:].strip()) for line in body.split("\n") if line.startswith("data:"))
    whole = [at(event, "response") for event in events if at(event, "response")]
    return whole[-1] if whole else None


def matches_otel(head: Sequence[Any]) -> str:
    """``otlp`` where the first record has spans."""
    return "otlp" if isinstance(at(head[0], "resourceSpans"), list) else ""


def read_otel(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of the chat spans, with the results that ``execute_tool`` spans hold."""
    spans: list[Any] = []
    for record in records:
        scopes = (
            scope for each in items_at(record, "resourceSpans") for scope in items_at(each, "scopeSpans")
        )
        found = [span for scope in scopes for span in items_at(scope, "spans")]
        ledger.num_records -= 1  # a record counts as its spans
        spans += found
        if not found:
            ledger.dropped("a record without spans")
    joined = ConversationJoiner("otel-genai", name)
    tools: dict[str, tuple[str, ToolCall, StepResult]] = {}
    spans.sort(key=lambda span: _number(at(span, "startTimeUnixNano")))
    ledger.put_inner(partial(_span, joined, tools), spans)
    alone = dict(tools)
    for trace in (builder.trace for builder in joined.builders):
        for _, step in trace.agent_steps():
            results = {result.call_id: result for result in step.results}
            for call_id in (call.call_id for call in step.calls if call.call_id in tools):
                alone.pop(call_id, None)
                results[call_id] = tools[call_id][2]
            step.results = list(results.values())
        yield trace
    builders: dict[str, TraceBuilder] = {}  # one for each trace id of which only the tools were recorded
    for trace_id, call, result in alone.values():
        new = TraceBuilder(Trace(trace_id or name, "otel-genai"))
        builders.setdefault(trace_id, new).add("agent", [call, result])
    yield from (builder.trace for builder in builders.values())


def _span(
    joined: ConversationJoiner, tools: dict[str, tuple[str, ToolCall, StepResult]], span: dict[str, Any]
) -> None:
    own = {text_at(each, "key"): _value(at(each, "value")) for each in items_at(span, "attributes")}
    operation = own.get("gen_ai.operation.name")
    if operation == "execute_tool":
        call_id, content = text_at(own, "gen_ai.tool.call.id"), own.get("gen_ai.tool.call.result")
        if not call_id or content is None:
            raise Dropped("a tool's span without the id of its call or without content")
        arguments = json_text(own.get("gen_ai.tool.call.arguments"))
        is_error = True if at(span, "status", "code") in (2, "STATUS_CODE_ERROR") else None
        result = StepResult(call_id, text := json_text(content), is_error, exit_code_in(text))
        call = ToolCall(text_at(own, "gen_ai.tool.name"), arguments, call_id)
        tools[call_id] = text_at(span, "traceId"), call, result
        return
    if operation not in ("chat", "text_completion", "generate_content"):
        raise Dropped("a span of an agent or of something else")
    given = {side: parsed(own.get(f"gen_ai.{side}.messages")) for side in ("input", "output")}
    messages, answers = items_at(given, "input"), items_at(given, "output")
    if not messages and not answers:
        raise Dropped("a span without messages: content was not recorded")
    if text := text_of(parsed(own.get("gen_ai.system_instructions"))):
        messages = [{"role": "system", "content": text}, *messages]
    model = own.get("gen_ai.response.model") or own.get("gen_ai.request.model")
    joined.add(messages, answers, parsed(own.get("gen_ai.tool.definitions")), model)


def _value(value: Any) -> Any:
    """The value of OTLP's typed object; whole numbers are texts there."""
    if "intValue" in (value or ()):
        return _number(value["intValue"])
    return next(iter(value.values()), None) if isinstance(value, dict) else None


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
