"""Sessions of the Gemini CLI: one document, or since 0.40 lines with ``$set`` and ``$rewindTo``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.trace_records import (
    Ledger,
    StepResult,
    Trace,
    TraceBuilder,
    arguments_text,
    items,
    mapping,
    string,
    text_of,
)


def matches_gemini_cli(head: Sequence[Any]) -> str:
    """``document`` or ``lines``."""
    first = mapping(head[0] if head else None)
    if "sessionId" not in first or "uuid" in first:
        return ""
    if isinstance(first.get("messages"), list) and "projectHash" in first:
        return "document"
    return "lines" if "projectHash" in first else ""


def read_gemini_cli(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """The one conversation of a session."""
    builder = TraceBuilder(Trace(name, "gemini-cli", agent="gemini-cli"))
    place_of: dict[str, int] = {}
    parent: int | None = None
    for record in map(mapping, records):
        messages = [record]
        if "messages" in record or "projectHash" in record:
            builder.trace.trace_id = string(record.get("sessionId")) or name
            ledger.kept("metadata of the session")
            messages = [mapping(each) for each in items(record.get("messages"))]
            ledger.num_records += len(messages)
        for message in messages:
            if "$rewindTo" in message:
                parent = place_of.get(string(message["$rewindTo"]), builder.last)
                ledger.kept("rewinding")
            elif "$set" in message:
                ledger.kept("metadata of the session")
            elif (why := _add(builder, message, parent)) == "":
                place_of[string(message.get("id"))] = builder.last
                parent = None
                ledger.mapped()
            else:
                ledger.dropped(why)
    yield builder.trace


def _add(builder: TraceBuilder, message: Mapping[str, Any], parent: int | None) -> str:
    kind, text = message.get("type"), text_of(message.get("content"))
    if kind == "user":
        builder.message("user", text, timestamp=string(message.get("timestamp")))
    elif kind == "gemini":
        builder.open = None
        step = builder.answer(string(message.get("timestamp")))
        step.text, step.model = text, string(message.get("model"))
        builder.trace.model = builder.trace.model or step.model
        thoughts = (mapping(each) for each in items(message.get("thoughts")))
        step.reasoning = "\n".join(f"{t.get('subject', '')}: {t.get('description', '')}" for t in thoughts)
        tokens = mapping(message.get("tokens"))
        names = {"prompt_tokens": "input", "completion_tokens": "output", "cached_tokens": "cached"}
        step.usage = {
            ours: tokens[theirs] for ours, theirs in names.items() if type(tokens.get(theirs)) is int
        }
        for call in map(mapping, items(message.get("toolCalls"))):
            _add_call(builder, call)
    else:
        return f"a message of the kind {kind!r:.20}"
    if parent is not None:
        builder.trace.steps[-1].parent = parent
    return ""


def _add_call(builder: TraceBuilder, call: Mapping[str, Any]) -> None:
    step = builder.trace.steps[-1]
    builder.call(
        step,
        ToolCall(
            string(call.get("name")) or "unknown", arguments_text(call.get("args")), string(call.get("id"))
        ),
    )
    texts = []
    for part in map(mapping, items(call.get("result"))):
        response = mapping(mapping(part.get("functionResponse")).get("response"))
        texts.append(text_of(response.get("output") or response.get("error") or part.get("text")))
    status = call.get("status")
    if status == "cancelled":
        step.flags.add("denied")
    if texts or status:
        is_error = status == "error" if isinstance(status, str) else None
        step.results.append(StepResult(step.calls[-1].call_id, "\n".join(texts), is_error))
