"""Logs of chat completions and of Responses: rows that repeat their history become one conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_replication.traces.readers.chat_messages import add_message, function_tools, usage_of
from composer_replication.traces.readers.response_items import items_as_messages
from composer_replication.traces.trace_records import (
    Ledger,
    RepositoryState,
    Trace,
    TraceBuilder,
    arguments_text,
    items,
    mapping,
    parsed,
    string,
    text_of,
)


def matches_chat(head: Sequence[Any]) -> str:
    """The version where it is a log of chat completions: rows with messages, pairs of request and response, or batches."""
    first = mapping(head[0] if head else None)
    if "info" in first or "trajectory_format" in first:
        return ""
    if "preferred_output" in first:
        return "preference"
    request = _request(first)
    if _are_messages(request.get("messages")):
        return "completions" if first.get("response") is not None else "rows"
    return ""


def matches_responses(head: Sequence[Any]) -> str:
    """Likewise for Responses, which take ``input``."""
    request = _request(mapping(head[0] if head else None))
    return "responses" if isinstance(request.get("input"), list | str) and "model" in request else ""


def read_chat(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of rows ``{messages, …}``, ``{request, response}``, ``{messages, response}``."""
    joined = ConversationJoiner("openai-chat", name)
    for row in map(mapping, records):
        request = _request(row)
        messages = items(request.get("messages"))
        if "preferred_output" in row:
            messages = items(mapping(row.get("input")).get("messages"))
            answers = items(row["preferred_output"])
            body: Mapping[str, Any] = {}
        else:
            body = _body(row.get("response"))
            answers = [mapping(choice).get("message") for choice in items(body.get("choices"))[:1]]
        if not _are_messages(messages):
            ledger.dropped("a row without messages")
            continue
        usage = usage_of(body.get("usage"))
        tools = function_tools(request.get("tools") or mapping(row.get("kwargs")).get("tools"))
        joined.add(messages, answers, tools, string(body.get("model")) or string(request.get("model")), usage)
        joined.note_state(row)
        ledger.mapped()
    yield from joined.traces()


def read_responses(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of Responses: input items and output items, streams kept as text too."""
    joined = ConversationJoiner("openai-responses", name)
    for row in map(mapping, records):
        request = _request(row)
        given = request.get("input")
        if given is None:
            ledger.dropped("a row without input")
            continue
        if request.get("previous_response_id"):
            ledger.dropped("its context is stored at the provider (previous_response_id)")
            continue
        body = _body(row.get("response"))
        messages = items_as_messages(given)
        if instructions := string(request.get("instructions")):
            messages.insert(0, {"role": "system", "content": instructions})
        answers = items_as_messages(body.get("output"))
        model = string(body.get("model")) or string(request.get("model"))
        joined.add(
            messages, answers, function_tools(request.get("tools")), model, usage_of(body.get("usage"))
        )
        ledger.mapped()
    yield from joined.traces()


class ConversationJoiner:
    """Conversations by the digest of everything that they hold so far, so that a row extends the one that it repeats."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name
        self._builders: list[TraceBuilder] = []
        self._tips: dict[bytes, TraceBuilder] = {}
        self._builder: TraceBuilder | None = None

    def add(
        self,
        messages: Sequence[Any],
        answers: Sequence[Any],
        tools: list[dict[str, Any]],
        model: str,
        usage: dict[str, int],
    ) -> None:
        chain = list(_digests(messages))
        known = next((n for n in range(len(chain), 0, -1) if chain[n - 1] in self._tips), 0)
        if known:
            builder = self._tips.pop(chain[known - 1])
        else:
            number = len(self._builders)
            builder = TraceBuilder(Trace(f"{self._name}#{number}", self._kind, model=model))
            self._builders.append(builder)
        builder.trace.tools = tools or builder.trace.tools
        for message in messages[known:]:
            add_message(builder, message)
        tip = chain[-1] if chain else b""
        for answer in answers:
            if add_message(builder, answer) == "" and builder.open is not None:
                builder.open.usage, builder.open.model = usage, model
        tip = next(reversed([tip, *_digests(answers, tip)]))
        if known < len(messages) or answers:
            self._tips[tip] = builder
        self._builder = builder

    def note_state(self, row: Mapping[str, Any]) -> None:
        """A SWE-bench id that stands beside the messages."""
        if self._builder is not None and (task := string(row.get("instance_id"))):
            self._builder.trace.state = RepositoryState(task_id=task)
            if isinstance(row.get("resolved"), bool):
                self._builder.trace.passed = row["resolved"]

    def traces(self) -> Iterator[Trace]:
        for builder in self._builders:
            yield builder.trace


def _digests(messages: Sequence[Any], before: bytes = b"") -> Iterator[bytes]:
    """For each message the digest of all up to it: role, text and calls, however they are spelled."""
    for message in map(mapping, messages):
        calls = [
            [string(function.get("name")), parsed(arguments_text(function.get("arguments")))]
            for function in (
                mapping(mapping(each).get("function")) for each in items(message.get("tool_calls"))
            )
        ]
        text = text_of(message.get("content"))
        whole = json.dumps([message.get("role"), text, calls], sort_keys=True, default=str)
        before = hashlib.sha256(before + whole.encode("utf-8", "replace")).digest()
        yield before


def _request(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request of a row, whether it stands in it, beside a response or in a batch."""
    request = mapping(row.get("request")) or row
    body = parsed(request.get("body"))
    return body if isinstance(body, Mapping) else request


def _body(response: Any) -> Mapping[str, Any]:
    """The response's object; of a stream of events the one that completes it."""
    found = mapping(response)
    body = found.get("body", found)
    if isinstance(body, str):
        whole = parsed(body)
        if isinstance(whole, Mapping):
            return whole
        events = (parsed(line[5:].strip()) for line in body.split("\n") if line.startswith("data:"))
        last = [mapping(event) for event in events if "response" in mapping(event)]
        return mapping(last[-1].get("response")) if last else {}
    return mapping(body)


def _are_messages(value: Any) -> bool:
    return bool(items(value)) and all(isinstance(each, Mapping) and "role" in each for each in value)
