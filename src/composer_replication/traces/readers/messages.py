"""Messages however chats, Responses, Anthropic's blocks, OpenTelemetry and ATIF spell them, and the logs that consist of them.

Each row of a log of chats or Responses, and each chat span (GenAI conventions from 1.37 on, OTLP JSON), repeats its history: those
that do become one conversation. The Agent Trajectory Interchange Format (ATIF) of the Harbor project is read leniently from 1.0 to
1.8, and written as 1.7; a line of ours holds in ``extra`` what the format has no field for, so that it is read back as it was.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tokens.call_dialects import read_calls
from composer_replication.traces.json_values import at, items_at, json_text, parsed, text_at, text_of, typed
from composer_replication.traces.trace_records import (
    FLAGS,
    Dropped,
    Ledger,
    Part,
    RepositoryState,
    Source,
    StepResult,
    Thought,
    Trace,
    TraceBuilder,
    TraceStep,
)

ROLES: dict[str, Source] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "agent", "tool": "user", "function": "user",
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
    source, parts = "agent" if role is None else ROLES[role], list(parts_of(message))
    text = text_of(message.get("content")) if source == "user" else ""
    if role == "user" and builder.waits and _CALL_IN_TEXT in builder.trace.steps[-1].text:
        parts = [StepResult("", text.removeprefix("OBSERVATION:").lstrip())]
    if text.startswith(_INJECTED):
        flags = (*flags, "injected")
    return builder.add(source, parts, *flags, key="" if "type" in message else None, **known)


def parts_of(message: dict[str, Any]) -> Iterator[Part]:
    """Texts, thoughts, calls and results of a message, of an item, or of one block."""
    role, content = message.get("role"), message.get("content", message.get("parts"))
    if role is None and message.get("type") != "message":
        yield from content_parts([message])
    elif role in ("tool", "function") and "parts" not in message:
        is_error = typed(bool, message.get("is_error"))
        yield StepResult(text_at(message, "tool_call_id"), text_of(content), is_error)
    else:
        if thought := text_of(message.get("reasoning_content") or message.get("reasoning")):
            yield Thought(thought)
        yield from (Thought("", text_at(each, "signature")) for each in items_at(message, "thinking_blocks"))
        yield from content_parts(content)
        said = [*items_at(message, "tool_calls"), message.get("function_call")]  # the second is of 2023
        given = (call for call in said if isinstance(call, dict))
        calls = [part for call in given for part in _call(call, "")]
        yield from calls
        if role == "assistant" and not calls and _CALL_IN_TEXT in (text := text_of(content)):
            yield from read_calls(f"<tool_call>{text[text.index(_CALL_IN_TEXT) :]}</tool_call>", "hermes")


def content_parts(content: Any) -> Iterator[Part]:
    """The parts of a content: a text, or blocks."""
    for block in content if isinstance(content, list) else [content]:
        kind = text_at(block, "type")
        if kind in _THOUGHTS:
            sealed = (text_at(block, key) for key in ("signature", "encrypted_content", "data"))
            text = text_of(block.get("summary") or block.get("thinking") or block.get("content"))
            yield Thought(text, next(filter(None, sealed), ""))
        elif kind in _CALLS:
            yield from _call(block, kind)
        elif kind in _RESULTS:
            yield _result(block, kind)
        elif text := text_of(block):
            yield text


def _call(block: dict[str, Any], kind: str) -> Iterator[Part]:
    own = typed(dict, block.get("function")) or block
    given = next((at(own, key) for key in ("arguments", "input", "action") if at(own, key) is not None), None)
    call_id = text_at(block, "call_id") or text_at(block, "id")
    if name := text_at(own, "name") or kind.removesuffix("_call"):
        yield ToolCall(name, json_text({"input": given} if kind == "custom_tool_call" else given), call_id)
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


def exit_code_in(text: str) -> int | None:
    """The exit code that Codex and others write into the text of a result."""
    found = _EXIT_CODE.search(text[:2000])
    return int(found[1]) if found else None


def function_tools(tools: Any) -> list[dict[str, Any]]:
    """Definitions of tools in the form of chat completions, whichever of the forms they have."""
    found = []
    for tool in tools if isinstance(tools, list) else ():
        own = at(tool, "function") or tool
        if name := text_at(own, "name") or text_at(own, "title"):
            schemas = (typed(dict, at(own, key)) for key in ("parameters", "input_schema"))
            schema = next(filter(None, schemas), {})
            function = {"name": name, "description": text_at(own, "description"), "parameters": schema}
            found.append({"type": "function", "function": function})
    return found


# ------------------------------------------------------------------------------ logs


def chat_messages(row: Any) -> list[Any]:
    """Of the request of a row; none where one of them is none."""
    messages = items_at(request_of(row), "messages")
    return messages if all(at(each, "role") is not None for each in messages) else []


def request_of(row: Any) -> Any:
    """The request of a row, whether it stands in it, beside a response or in a batch."""
    request = at(row, "request") or row
    return typed(dict, parsed(at(request, "body"))) or request


def read_requests(kind: str, records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of rows ``{messages, …}``, ``{request, response}``, ``{messages, response}``, or with ``input`` (Responses)."""
    joined = _Joiner(kind, name)
    for record in records:
        ledger.put(joined.row, record)
    yield from (builder.trace for builder in joined.builders)


class _Joiner:
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
        for group, how in ((messages[known:], {}), (answers, {"model": model})):
            builder.close()
            for message in group:
                # what cannot be added leaves the row's other messages where they are
                with suppress(Dropped, AttributeError, TypeError, ValueError):
                    add_message(builder, message, **how)
        builder.trace.model = builder.trace.model or (typed(str, model) or "")
        self._tips[chain[-1]] = builder
        return builder.trace

    def row(self, row: dict[str, Any]) -> None:
        """Add what a row of a log says."""
        request, response, messages = request_of(row), _response(row.get("response")), chat_messages(row)
        if self.kind == "openai-responses":  # rows of chats have keys of these names, too
            if at(request, "previous_response_id"):
                raise Dropped("its context is stored at the provider (previous_response_id)")
            given = at(request, "input")
            text = [{"role": "user", "content": given}] if isinstance(given, str) else []
            messages = text or items_at(request, "input") or messages
            if instructions := text_at(request, "instructions"):
                messages = [{"role": "system", "content": instructions}, *messages]
        if not messages:
            raise Dropped("a row without messages")
        choices = (at(each, "message") for each in items_at(response, "choices")[:1])
        answers = items_at(response, "output") or list(choices)
        tools = at(request, "tools") or at(row, "kwargs", "tools")
        trace = self.add(messages, answers, tools, text_at(response, "model") or at(request, "model"))
        if task := text_at(row, "instance_id"):  # of SWE-bench, beside the messages
            trace.state, trace.passed = RepositoryState(task_id=task), typed(bool, row.get("resolved"))


def _digests(messages: Sequence[Any]) -> list[bytes]:
    """For each message the digest of all up to it: source, texts and calls, however they are spelled; thoughts may be left out."""
    digests, before = [], b""
    for message in messages:
        known = list(parts_of(message)) if is_item(message) else []
        # a call of the server's own tool has result and sources in the answer, and loses them where it is repeated
        left_out = (Thought, StepResult) if any(isinstance(part, ToolCall) for part in known) else Thought
        parts = [
            [part.name, json.dumps(parsed(part.arguments), sort_keys=True)]
            if isinstance(part, ToolCall)
            else getattr(part, "text", part)
            for part in known
            if not isinstance(part, left_out)
        ]
        if at(message, "type") == "web_search_call":
            parts = [message["type"]]
        if any(parts):
            is_given = message.get("role") in ("user", "system", "developer")
            before += json.dumps([is_given, *filter(None, parts)]).encode()
            before = hashlib.sha256(before).digest()
        digests.append(before)
    return digests


def step_chain(trace: Trace) -> tuple[int, ...]:
    """For each step a digest of it and of all before it; two traces share a beginning where these are equal."""
    chain, before = [], b""
    for step in trace.steps:
        calls = "".join(f"\0{call.name}\0{call.arguments}" for call in step.calls)
        whole = f"{step.source}{step.text}{calls}".encode("utf-8", "replace")
        before = hashlib.blake2b(before + whole, digest_size=8).digest()
        chain.append(int.from_bytes(before))
    return tuple(chain)


def _response(response: Any) -> Any:
    """The response's object; of a stream of events the one that completes it."""
    body = parsed(at(response, "body") or response)
    if not isinstance(body, str):
        return body
    events = (parsed(line[5:].strip()) for line in body.split("\n") if line.startswith("data:"))
    whole = [at(event, "response") for event in events if at(event, "response")]
    return whole[-1] if whole else None


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
    joined = _Joiner("otel-genai", name)
    tools: dict[str, tuple[str, ToolCall, StepResult]] = {}
    spans.sort(key=lambda span: str(at(span, "startTimeUnixNano")).zfill(20))
    ledger.put_inner(partial(_span, joined, tools), spans)
    answered: set[str] = set()
    for trace in (builder.trace for builder in joined.builders):
        for _, step in trace.agent_steps():
            own = {call.call_id: tools[call.call_id][2] for call in step.calls if call.call_id in tools}
            step.results = list(({result.call_id: result for result in step.results} | own).values())
            answered |= own.keys()
        yield trace
    builders: dict[str, TraceBuilder] = {}  # one for each trace id of which only the tools were recorded
    for trace_id, call, result in (found for call_id, found in tools.items() if call_id not in answered):
        new = TraceBuilder(Trace(trace_id or name, "otel-genai"))
        builders.setdefault(trace_id, new).add("agent", [call, result])
    yield from (builder.trace for builder in builders.values())


def _span(joined: _Joiner, tools: dict[str, tuple[str, ToolCall, StepResult]], span: dict[str, Any]) -> None:
    pairs = [(text_at(each, "key"), at(each, "value")) for each in items_at(span, "attributes")]
    own = {key: next(iter(value.values()), None) for key, value in pairs if isinstance(value, dict)}
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


# ------------------------------------------------------------------------------ ATIF

_TRACE = "composer_replication_trace"
_EPISODE = "composer_replication"
_RAW_CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_calls?_|<｜tool▁call")
"""Where the markup of a call begins in an answer of our own loop, which keeps what was sampled as it is."""
_END_TOKENS = re.compile(r"\s*<\|(?:im_end|eot_id|eom_id|endoftext|end)\|>\s*$")


def trace_row(trace: Trace) -> dict[str, Any]:
    """A trace as an ATIF object, valid for the models of Harbor 0.26."""
    known = {"model_name": trace.model, "tool_definitions": trace.tools}
    ours = {key: getattr(trace, key) for key in ("format", "prompt_origin", "parent", "passed")}
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": trace.trace_id,
        "trajectory_id": trace.trace_id,
        "agent": {"name": trace.agent or trace.format, "version": trace.version or "unknown"} | _given(known),
        "steps": [_step_row(step, idx) for idx, step in enumerate(trace.steps)],
        "extra": {_TRACE: {**ours, "format_version": trace.version, "state": asdict(trace.state)}},
    }


def trace_of(row: dict[str, Any]) -> Trace:
    """The trace that a line of ours holds."""
    return next(_traces(row, Ledger(), text_at(row, "trajectory_id"), None))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing: false and 0 say something."""
    return {key: value for key, value in fields.items() if value or value == 0}


def _step_row(step: TraceStep, idx: int) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    for call in step.calls:
        arguments = parsed(call.arguments)
        row = {"tool_call_id": call.call_id, "function_name": call.name, "arguments": arguments}
        if not isinstance(arguments, dict):
            row |= {"arguments": {}, "extra": {"arguments_text": call.arguments}}
        calls.append(row)
    results = []
    for result in step.results:
        extra = _given({"is_error": result.is_error, "exit_code": result.exit_code})
        results.append({"content": result.text} | _given({"source_call_id": result.call_id, "extra": extra}))
    parent = step.parent + 1 if step.parent != idx - 1 else None
    extra = _given({"parent": parent, "flags": sorted(step.flags), "sealed": step.sealed})
    answer = {"model_name": step.model, "reasoning_content": step.reasoning, "tool_calls": calls}
    return {
        "step_id": idx + 1,
        "source": step.source,
        "message": step.text,
        **_given(answer if step.source == "agent" else {}),
        **_given({"observation": _given({"results": results}), "extra": extra}),
        **_given({"is_copied_context": "copied" in step.flags or None}),
    }


def read_atif(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document or line, and of each sub-agent that is embedded in it."""
    for number, document in enumerate(records):
        yield from _traces(document, ledger, f"{name}#{number}", None)


def _traces(document: Any, ledger: Ledger, name: str, parent: tuple[str, str] | None) -> Iterator[Trace]:
    ledger.put(lambda _: "kept: the document", document)
    ours, episode = at(document, "extra", _TRACE), at(document, "extra", _EPISODE)
    trace_id = text_at(document, "trajectory_id") or text_at(document, "session_id") or name
    trace = Trace(trace_id, text_at(ours, "format") or "atif", agent=text_at(document, "agent", "name"))
    trace.version = text_at(ours, "format_version") if ours else text_at(document, "schema_version")
    trace.tools = function_tools(at(document, "agent", "tool_definitions"))
    trace.state = RepositoryState(*(text_at(ours, "state", key) for key in RepositoryState.__slots__))
    take = partial(_add_step, TraceBuilder(trace), has_raw_calls=bool(episode))
    ledger.put_inner(take, items_at(document, "steps"))
    trace.model = text_at(document, "agent", "model_name") or trace.model
    has_prompt = bool(trace.tools) and trace.prompt_origin == "recorded"
    is_recorded = at(ours, "prompt_origin") == "recorded" if ours else has_prompt or bool(episode)
    trace.prompt_origin = "recorded" if is_recorded else "rebuilt"
    trace.parent, trace.passed = parent, typed(bool, at(ours, "passed"))
    match at(ours, "parent"):
        case [str(session), str(call_id)]:
            trace.parent = (session, call_id)
    if episode:
        trace.state = RepositoryState(text_at(episode, "task_id"))
        outcomes = at(episode, "score", "outcomes")
        if isinstance(outcomes, dict) and outcomes:
            trace.passed = set(outcomes.values()) == {"passed"} and not at(episode, "score", "error")
    yield trace
    for number, inner in enumerate(items_at(document, "subagent_trajectories")):
        ledger.num_records += 1
        yield from _traces(inner, ledger, f"{name}/{number}", (trace_id, ""))


def _add_step(builder: TraceBuilder, row: dict[str, Any], *, has_raw_calls: bool) -> None:
    source, extra, text = row.get("source"), row.get("extra") or {}, text_of(row.get("message"))
    if source not in ("system", "user", "agent"):
        raise Dropped("a step without a source")
    parts = list(_answer_parts(row)) if source == "agent" else []
    if has_raw_calls:
        is_call = any(isinstance(part, ToolCall) for part in parts)
        text = _END_TOKENS.sub("", _RAW_CALL.split(text)[0].rstrip() if is_call else text)
    flags = {each for each in items_at(extra, "flags") if each in FLAGS}
    flags |= {"copied"} if row.get("is_copied_context") is True else set()
    number = typed(int, at(extra, "parent"))
    parent = number - 1 if number is not None and 0 <= number <= builder.last + 1 else None
    builder.add(source, [text, *parts], *flags, parent=parent, model=row.get("model_name"))


def _answer_parts(row: dict[str, Any]) -> Iterator[Part]:
    yield Thought(text_at(row, "reasoning_content"))
    yield from (Thought("", typed(str, each) or "") for each in items_at(row, "extra", "sealed"))
    for call in items_at(row, "tool_calls"):
        written = at(call, "extra", "arguments_text")
        arguments = json_text(at(call, "arguments") if written is None else written)
        yield ToolCall(text_at(call, "function_name"), arguments, text_at(call, "tool_call_id"))
    for result in items_at(row, "observation", "results"):
        is_error, code = (at(result, "extra", key) for key in ("is_error", "exit_code"))
        call_id, text = text_at(result, "source_call_id"), text_of(at(result, "content"))
        yield StepResult(call_id, text, typed(bool, is_error), typed(int, code))
