"""Spans of OpenTelemetry's GenAI conventions from 1.37 on, as OTLP JSON.

Messages are opt-in: a span without them is counted. A chat span repeats its history, so spans are joined as rows of a chat log are;
results come from the spans of the tools, and where these alone were recorded, their calls are the session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.json_values import arguments_text, at, items, parsed, string, text_of
from composer_replication.traces.readers.chat_logs import ConversationJoiner
from composer_replication.traces.readers.messages import exit_code_in
from composer_replication.traces.trace_records import Dropped, Ledger, StepResult, Trace, TraceBuilder

_CHAT = ("chat", "text_completion", "generate_content")


def matches_otel(head: Sequence[Any]) -> str:
    """``otlp`` where the first record has spans."""
    return "otlp" if head and isinstance(at(head[0], "resourceSpans"), list) else ""


def read_otel(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of the chat spans, with the results that ``execute_tool`` spans hold."""
    spans: list[Any] = []
    for record in records:
        resources = items(at(record, "resourceSpans"))
        scopes = [scope for each in resources for scope in items(at(each, "scopeSpans"))]
        found = [span for scope in scopes for span in items(at(scope, "spans"))]
        ledger.num_records -= 1  # a record counts as its spans
        spans += found
        if not found:
            ledger.dropped("a record without spans")
    reader = _Reader(name)
    ledger.put_inner(reader.take, sorted(spans, key=lambda span: _number(at(span, "startTimeUnixNano"))))
    yield from reader.traces()


class _Reader:
    def __init__(self, name: str) -> None:
        self._joiner, self._name = ConversationJoiner("otel-genai", name), name
        self._tools: dict[str, tuple[str, ToolCall, StepResult]] = {}

    def take(self, span: dict[str, Any]) -> None:
        own = {string(at(each, "key")): _value(at(each, "value")) for each in items(span.get("attributes"))}
        operation = own.get("gen_ai.operation.name")
        if operation in _CHAT:
            self._chat(own)
        elif operation == "execute_tool":
            self._tool(own, span)
        else:
            raise Dropped("a span of an agent or of something else")

    def traces(self) -> Iterator[Trace]:
        """The conversations, and one for each trace id of which only the tools were recorded."""
        alone = dict(self._tools)
        for trace in self._joiner.traces():
            for _, step in trace.agent_steps():
                results = {result.call_id: result for result in step.results}
                for call in (call for call in step.calls if call.call_id in self._tools):
                    alone.pop(call.call_id, None)
                    results[call.call_id] = self._tools[call.call_id][2]
                step.results = list(results.values())
            yield trace
        builders: dict[str, TraceBuilder] = {}
        for trace_id, call, result in alone.values():
            new = TraceBuilder(Trace(trace_id or self._name, "otel-genai"))
            builders.setdefault(trace_id, new).add("agent", [call, result])
        yield from (builder.trace for builder in builders.values())

    def _chat(self, own: dict[str, Any]) -> None:
        messages, answers = (
            items(parsed(own.get(f"gen_ai.{side}.messages"))) for side in ("input", "output")
        )
        if not messages and not answers:
            raise Dropped("a span without messages: content was not recorded")
        if text := text_of(parsed(own.get("gen_ai.system_instructions"))):
            messages = [{"role": "system", "content": text}, *messages]
        tools = parsed(own.get("gen_ai.tool.definitions"))
        model = own.get("gen_ai.response.model") or own.get("gen_ai.request.model")
        self._joiner.add(messages, answers, tools, model)

    def _tool(self, own: dict[str, Any], span: dict[str, Any]) -> None:
        call_id, content = string(own.get("gen_ai.tool.call.id")), own.get("gen_ai.tool.call.result")
        if not call_id or content is None:
            raise Dropped("a tool's span without the id of its call or without content")
        text = arguments_text(content)
        is_error = True if at(span, "status", "code") in (2, "STATUS_CODE_ERROR") else None
        arguments = arguments_text(own.get("gen_ai.tool.call.arguments"))
        call = ToolCall(string(own.get("gen_ai.tool.name")), arguments, call_id)
        result = StepResult(call_id, text, is_error, exit_code_in(text))
        self._tools[call_id] = string(span.get("traceId")), call, result


def _value(value: Any) -> Any:
    """The value of OTLP's typed object; whole numbers are texts there."""
    if not isinstance(value, dict):
        return None
    return _number(value["intValue"]) if "intValue" in value else next(iter(value.values()), None)


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0
