"""Spans of OpenTelemetry's GenAI conventions, as OTLP JSON, one attribute object, or an export of Langfuse.

Read are ``gen_ai`` attributes from 1.37 on, pydantic-ai's older spellings, and OpenInference. Messages are opt-in: a span
without them is counted. A chat span repeats its history, so spans are joined as rows of a chat log are.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.readers.chat_logs import ConversationJoiner
from composer_replication.traces.readers.chat_messages import function_tools, usage_of
from composer_replication.traces.readers.response_items import items_as_messages
from composer_replication.traces.trace_records import (
    Ledger,
    StepResult,
    Trace,
    TraceBuilder,
    arguments_text,
    items,
    mapping,
    parsed,
    string,
    text_of,
)

_OPENINFERENCE = re.compile(r"llm\.(input|output)_messages\.(\d+)\.message\.(.+)")
_EXIT_CODE = re.compile(r"exit code (-?\d+)")


def matches_otel(head: Sequence[Any]) -> str:
    """``otlp``, ``attributes`` of one span, or ``langfuse``."""
    first = mapping(head[0] if head else None)
    if isinstance(first.get("resourceSpans"), list):
        return "otlp"
    if isinstance(mapping(first.get("trace")).get("observations"), list) or isinstance(
        first.get("observations"), list
    ):
        return "langfuse"
    return "attributes" if any(key.startswith(("gen_ai.", "llm.", "openinference.")) for key in first) else ""


def read_otel(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of the chat spans, with the results that ``execute_tool`` spans hold."""
    spans: list[tuple[int, str, str, Mapping[str, Any]]] = []
    for number, record in enumerate(map(mapping, records)):
        found = list(_spans(record, number))
        ledger.num_records += len(found) - 1
        if not found:
            ledger.num_records += 1
            ledger.dropped("a record without spans")
        spans += found
    spans.sort(key=lambda span: span[0])
    joiner = ConversationJoiner("otel-genai", name)
    results: dict[str, StepResult] = {}
    calls: dict[str, tuple[str, ToolCall]] = {}
    for _, trace_id, span_name, attributes in spans:
        kind = _kind(attributes, span_name)
        if kind == "chat":
            _add_chat(joiner, attributes, ledger)
        elif kind == "tool":
            _add_result(results, calls, attributes, ledger, trace_id)
        else:
            ledger.dropped("a span of an agent or of something else")
    for trace in joiner.traces():
        for _, step in trace.agent_steps():
            for call in step.calls:
                calls.pop(call.call_id, None)
            answered = {result.call_id for result in step.results}
            own = (results.get(call.call_id) for call in step.calls if call.call_id not in answered)
            step.results += [result for result in own if result is not None]
            for result in step.results:
                if result.exit_code is None and result.call_id in results:
                    result.exit_code, result.is_error = (
                        results[result.call_id].exit_code,
                        results[result.call_id].is_error,
                    )
        yield trace
    yield from _without_chat(calls, results, name)


def _without_chat(
    calls: Mapping[str, tuple[str, ToolCall]], results: Mapping[str, StepResult], name: str
) -> Iterator[Trace]:
    """Sessions of which only the tools were recorded: answers without text, and no prompt."""
    builders: dict[str, TraceBuilder] = {}
    for call_id, (trace_id, call) in calls.items():
        builder = builders.setdefault(trace_id, TraceBuilder(Trace(trace_id or name, "otel-genai")))
        builder.open = None
        builder.call(builder.answer(), call)
        builder.result(results[call_id])
    yield from (builder.trace for builder in builders.values())


def _spans(record: Mapping[str, Any], number: int) -> Iterator[tuple[int, str, str, Mapping[str, Any]]]:
    """Start, trace id, name and attributes of every span of a record."""
    if "resourceSpans" in record:
        for resource in map(mapping, items(record["resourceSpans"])):
            for scope in map(mapping, items(resource.get("scopeSpans"))):
                for span in map(mapping, items(scope.get("spans"))):
                    attributes = _attributes(span.get("attributes"))
                    for event in map(mapping, items(span.get("events"))):
                        attributes |= _attributes(event.get("attributes"))
                    if mapping(span.get("status")).get("code") in (2, "STATUS_CODE_ERROR"):
                        attributes["error"] = True
                    yield (
                        _number(span.get("startTimeUnixNano")),
                        _hex(span.get("traceId")),
                        string(span.get("name")),
                        attributes,
                    )
    elif "observations" in record or "observations" in mapping(record.get("trace")):
        observations = record.get("observations") or mapping(record["trace"]).get("observations")
        ordered = sorted(map(mapping, items(observations)), key=lambda each: string(each.get("startTime")))
        for place, each in enumerate(ordered):
            metadata = mapping(parsed(each.get("metadata")))
            attributes = dict(mapping(parsed(metadata.get("attributes"))))
            attributes |= {
                "langfuse.type": each.get("type"),
                "langfuse.input": each.get("input"),
                "langfuse.output": each.get("output"),
                "langfuse.model": each.get("model"),
            }
            yield place, string(each.get("traceId")), string(each.get("name")), attributes
    else:
        yield number, "", "", record


def _attributes(pairs: Any) -> dict[str, Any]:
    return {string(each.get("key")): _value(each.get("value")) for each in map(mapping, items(pairs))}


def _value(value: Any) -> Any:
    """The value of OTLP's typed object; whole numbers are texts there."""
    found = mapping(value)
    if "intValue" in found:
        return _number(found["intValue"])
    if "arrayValue" in found:
        return [_value(each) for each in items(mapping(found["arrayValue"]).get("values"))]
    if "kvlistValue" in found:
        return _attributes(mapping(found["kvlistValue"]).get("values"))
    return next(iter(found.values()), None)


def _kind(attributes: Mapping[str, Any], name: str) -> str:
    operation = attributes.get("gen_ai.operation.name") or attributes.get("openinference.span.kind")
    if (
        operation in ("chat", "text_completion", "generate_content", "LLM")
        or attributes.get("langfuse.type") == "GENERATION"
    ):
        return "chat"
    if (
        operation in ("execute_tool", "TOOL")
        or "gen_ai.tool.call.id" in attributes
        or name.startswith("running tool")
    ):
        return "tool"
    return ""


def _add_chat(joiner: ConversationJoiner, attributes: Mapping[str, Any], ledger: Ledger) -> None:
    messages, answers = _messages(attributes, "input"), _messages(attributes, "output")
    system = parsed(attributes.get("gen_ai.system_instructions"))
    if text := text_of(system):
        messages.insert(0, {"role": "system", "content": text})
    if not messages and not answers:
        ledger.dropped("a span without messages: content was not recorded")
        return
    tools = function_tools(parsed(attributes.get("gen_ai.tool.definitions")))
    parameters = mapping(parsed(attributes.get("model_request_parameters")))
    if not tools:
        old = [
            {**tool, "parameters": tool.get("parameters_json_schema")}
            for tool in map(mapping, items(parameters.get("function_tools")))
        ]
        tools = function_tools(old)
    model = next(
        (
            string(attributes[key])
            for key in ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name", "langfuse.model")
            if string(attributes.get(key))
        ),
        "",
    )
    usage = usage_of({key.removeprefix("gen_ai.usage."): value for key, value in attributes.items()})
    joiner.add(messages, answers, tools, model, usage)
    ledger.mapped()


def _messages(attributes: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    """The messages of one side as a chat has them, from whichever attribute holds them."""
    for key in (
        f"gen_ai.{side}.messages",
        f"gen_ai.{'prompt' if side == 'input' else 'completion'}",
        f"langfuse.{side}",
    ):
        value = parsed(attributes.get(key))
        if isinstance(value, Mapping) and isinstance(value.get("output"), list):
            value = value["output"]
        if isinstance(value, Mapping) and "text" in value:
            value = [{"role": "assistant", "content": value["text"]}]
        if isinstance(value, list) and value:
            if any("type" in mapping(each) and "role" not in mapping(each) for each in value):
                return items_as_messages(value)
            return [found for each in map(mapping, value) for found in _of_parts(each)]
    return _of_openinference(attributes, side)


def _of_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message of typed parts as messages of a chat: each tool response is one of its own."""
    if not isinstance(message.get("parts"), list):
        return [dict(message)]
    texts, calls, results, thoughts = [], [], [], []
    for part in map(mapping, message["parts"]):
        kind = part.get("type")
        if kind == "tool_call":
            function = {"name": part.get("name"), "arguments": arguments_text(part.get("arguments"))}
            calls.append({"id": string(part.get("id")), "function": function})
        elif kind == "tool_call_response":
            content = part.get("response", part.get("result"))
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": string(part.get("id")),
                    "content": content if isinstance(content, str) else arguments_text(content),
                }
            )
        elif kind in ("thinking", "reasoning"):
            thoughts.append(text_of(part))
        else:
            texts.append(text_of(part))
    whole = {
        "role": message.get("role"),
        "content": "\n".join(texts),
        "tool_calls": calls,
        "reasoning_content": "\n".join(thoughts),
    }
    return ([whole] if texts or calls or thoughts or not results else []) + results


def _of_openinference(attributes: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for key, value in sorted(attributes.items()):
        match = _OPENINFERENCE.fullmatch(key)
        if match is None or match[1] != side:
            continue
        message = found.setdefault(int(match[2]), {"role": "", "content": "", "tool_calls": []})
        rest = match[3]
        if rest in ("role", "content", "tool_call_id"):
            message[rest] = value
        elif rest.endswith("message_content.text"):
            message["content"] += string(value)
        elif rest.endswith("function.name"):
            message["tool_calls"].append(
                {
                    "id": attributes.get(key.replace("function.name", "id")),
                    "function": {
                        "name": value,
                        "arguments": attributes.get(key.replace("function.name", "function.arguments")),
                    },
                }
            )
    return [found[place] for place in sorted(found)]


def _add_result(
    results: dict[str, StepResult],
    calls: dict[str, tuple[str, ToolCall]],
    attributes: Mapping[str, Any],
    ledger: Ledger,
    trace_id: str,
) -> None:
    call_id = string(attributes.get("gen_ai.tool.call.id"))
    content = next(
        (
            attributes[key]
            for key in ("gen_ai.tool.call.result", "tool_response", "output.value", "langfuse.output")
            if attributes.get(key) is not None
        ),
        None,
    )
    if not call_id or content is None:
        ledger.dropped("a tool's span without the id of its call or without content")
        return
    text = content if isinstance(content, str) else arguments_text(content)
    code = _EXIT_CODE.match(text)
    results[call_id] = StepResult(
        call_id, text, True if attributes.get("error") else None, int(code[1]) if code else None
    )
    arguments: Any = next(
        (attributes[key] for key in ("gen_ai.tool.call.arguments", "tool_arguments") if key in attributes), {}
    )
    calls[call_id] = (
        trace_id,
        ToolCall(string(attributes.get("gen_ai.tool.name")), arguments_text(arguments), call_id),
    )
    ledger.mapped()


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _hex(value: Any) -> str:
    """Ids are hexadecimal, or base64 where protobuf's own JSON was written."""
    text = string(value)
    if len(text) in (16, 32):
        return text
    try:
        return base64.b64decode(text, validate=True).hex()
    except (binascii.Error, ValueError):
        return text
