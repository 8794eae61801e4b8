"""Spans of OpenTelemetry's GenAI conventions, as OTLP JSON, one attribute object, or an export of Langfuse.

Read are ``gen_ai`` attributes from 1.37 on, pydantic-ai's older spellings, and OpenInference. Messages are opt-in: a span
without them is counted. A chat span repeats its history, so spans are joined as rows of a chat log are.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from composer_replication.records import ToolCall
from composer_replication.traces.json_values import arguments_text, at, items, parsed, string, text_of
from composer_replication.traces.readers.chat_logs import ConversationJoiner
from composer_replication.traces.trace_records import Dropped, Ledger, StepResult, Trace, TraceBuilder

_OPENINFERENCE = re.compile(r"llm\.(input|output)_messages\.(\d+)\.message\.(.+)")
_EXIT_CODE = re.compile(r"exit code (-?\d+)")
_CHAT = {"chat", "text_completion", "generate_content", "LLM", "GENERATION"}
_MODELS = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name", "langfuse.model")
_RESULTS = ("gen_ai.tool.call.result", "tool_response", "output.value", "langfuse.output")


def matches_otel(head: Sequence[Any]) -> str:
    """``otlp``, ``attributes`` of one span, or ``langfuse``."""
    first = head[0] if head and isinstance(head[0], dict) else {}
    if isinstance(first.get("resourceSpans"), list):
        return "otlp"
    if _observations(first):
        return "langfuse"
    return "attributes" if any(key.startswith(("gen_ai.", "llm.", "openinference.")) for key in first) else ""


def read_otel(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of the chat spans, with the results that ``execute_tool`` spans hold."""
    spans: list[_Span] = []
    for number, record in enumerate(records):
        found = list(_spans(record, number))
        ledger.num_records -= 1  # a record counts as its spans
        spans += found
        if not found:
            ledger.dropped("a record without spans")
    reader = _Reader(name)
    ledger.put_inner(reader.take, sorted(spans, key=lambda span: span.start))
    yield from reader.traces()


class _Span(NamedTuple):
    start: Any
    trace_id: str
    name: str
    attributes: dict[str, Any]


class _Reader:
    def __init__(self, name: str) -> None:
        self._joiner, self._name = ConversationJoiner("otel-genai", name), name
        self._results: dict[str, StepResult] = {}
        self._calls: dict[str, tuple[str, ToolCall]] = {}

    def take(self, span: _Span) -> None:
        own = span.attributes
        kinds = {
            string(own.get(key))
            for key in ("gen_ai.operation.name", "openinference.span.kind", "langfuse.type")
        }
        if kinds & _CHAT:
            self._chat(own)
        elif (
            kinds & {"execute_tool", "TOOL"}
            or "gen_ai.tool.call.id" in own
            or span.name.startswith("running tool")
        ):
            self._tool(own, span.trace_id)
        else:
            raise Dropped("a span of an agent or of something else")

    def traces(self) -> Iterator[Trace]:
        for trace in self._joiner.traces():
            for _, step in trace.agent_steps():
                known = {result.call_id: result for result in step.results}
                for call in step.calls:
                    self._calls.pop(call.call_id, None)
                    if call.call_id not in self._results:
                        continue
                    result = self._results[call.call_id]
                    if (own := known.get(call.call_id)) is None:
                        step.results.append(result)
                    else:
                        own.exit_code, own.is_error = result.exit_code, result.is_error
            yield trace
        builders: dict[str, TraceBuilder] = {}
        for trace_id, call in self._calls.values():  # of sessions of which only the tools were recorded
            trace = Trace(trace_id or self._name, "otel-genai")
            builder = builders.setdefault(trace_id, TraceBuilder(trace))
            builder.add("agent", [call, self._results[call.call_id]])
        yield from (builder.trace for builder in builders.values())

    def _chat(self, own: dict[str, Any]) -> None:
        messages, answers = _messages(own, "input"), _messages(own, "output")
        if text := text_of(parsed(own.get("gen_ai.system_instructions"))):
            messages.insert(0, {"role": "system", "content": text})
        if not messages and not answers:
            raise Dropped("a span without messages: content was not recorded")
        tools = parsed(own.get("gen_ai.tool.definitions"))
        tools = tools or at(parsed(own.get("model_request_parameters")), "function_tools")
        usage = {key.removeprefix("gen_ai.usage."): value for key, value in own.items()}
        self._joiner.add(messages, answers, tools, next(filter(None, map(own.get, _MODELS)), ""), usage)

    def _tool(self, own: dict[str, Any], trace_id: str) -> None:
        call_id = string(own.get("gen_ai.tool.call.id"))
        content = next((own[key] for key in _RESULTS if own.get(key) is not None), None)
        if not call_id or content is None:
            raise Dropped("a tool's span without the id of its call or without content")
        text = arguments_text(content)
        code = _EXIT_CODE.match(text)
        is_error = True if own.get("error") else None
        self._results[call_id] = StepResult(call_id, text, is_error, int(code[1]) if code else None)
        arguments = own.get("gen_ai.tool.call.arguments", own.get("tool_arguments"))
        call = ToolCall(string(own.get("gen_ai.tool.name")), arguments_text(arguments), call_id)
        self._calls[call_id] = trace_id, call


def _spans(record: Any, number: int) -> Iterator[_Span]:
    """Every span of a record."""
    if not isinstance(record, dict):
        return
    if "resourceSpans" in record:
        scopes = (scope for each in items(record["resourceSpans"]) for scope in items(at(each, "scopeSpans")))
        for span in (span for scope in scopes for span in items(at(scope, "spans"))):
            own = _attributes(at(span, "attributes"))
            for event in items(at(span, "events")):
                own |= _attributes(at(event, "attributes"))
            own |= {"error": True} if at(span, "status", "code") in (2, "STATUS_CODE_ERROR") else {}
            yield _Span(
                _number(at(span, "startTimeUnixNano")),
                _hex(at(span, "traceId")),
                string(at(span, "name")),
                own,
            )
    elif observations := _observations(record):
        observations = sorted(observations, key=lambda each: string(at(each, "startTime")))
        for place, each in enumerate(observations):
            own = parsed(at(parsed(at(each, "metadata")), "attributes"))
            own = {**(own if isinstance(own, dict) else {})}
            own |= {f"langfuse.{key}": at(each, key) for key in ("type", "input", "output", "model")}
            yield _Span(place, string(at(each, "traceId")), string(at(each, "name")), own)
    else:
        yield _Span(number, "", "", record)


def _observations(record: dict[str, Any]) -> list[Any]:
    return items(record.get("observations") or at(record.get("trace"), "observations"))


def _attributes(pairs: Any) -> dict[str, Any]:
    return {string(at(each, "key")): _value(at(each, "value")) for each in items(pairs)}


def _value(value: Any) -> Any:
    """The value of OTLP's typed object; whole numbers are texts there."""
    if not isinstance(value, dict):
        return None
    if "intValue" in value:
        return _number(value["intValue"])
    if "arrayValue" in value:
        return [_value(each) for each in items(at(value, "arrayValue", "values"))]
    if "kvlistValue" in value:
        return _attributes(at(value, "kvlistValue", "values"))
    return next(iter(value.values()), None)


def _messages(own: dict[str, Any], side: str) -> list[Any]:
    """The messages of one side as a chat has them, from whichever attribute holds them."""
    old = "gen_ai.prompt" if side == "input" else "gen_ai.completion"
    for key in (f"gen_ai.{side}.messages", old, f"langfuse.{side}"):
        value = parsed(own.get(key))
        value = at(value, "output") if isinstance(at(value, "output"), list) else value
        if text := at(value, "text"):
            return [{"role": "assistant", "content": text}]
        if isinstance(value, list) and value:
            return list(value)
    found: dict[int, dict[str, Any]] = {}
    for key, value in sorted(own.items()):
        match = _OPENINFERENCE.fullmatch(key)
        if match is None or match[1] != side:
            continue
        message = found.setdefault(int(match[2]), {"role": "", "content": "", "tool_calls": []})
        if match[3] in ("role", "content", "tool_call_id"):
            message[match[3]] = value
        elif match[3].endswith("message_content.text"):
            message["content"] = string(message["content"]) + string(value)
        elif match[3].endswith("function.name"):
            arguments = own.get(key.replace("function.name", "function.arguments"))
            function = {"name": value, "arguments": arguments}
            message["tool_calls"].append(
                {"id": own.get(key.replace("function.name", "id")), "function": function}
            )
    return [found[place] for place in sorted(found)]


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _hex(value: Any) -> str:
    """Ids are hexadecimal, or base64 where protobuf's own JSON was written."""
    text = string(value)
    try:
        return text if len(text) in (16, 32) else base64.b64decode(text, validate=True).hex()
    except (binascii.Error, ValueError):
        return text
