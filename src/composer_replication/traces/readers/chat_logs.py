"""Logs of chat completions and of Responses: rows that repeat their history become one conversation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.json_values import at, flag, items, parsed, string
from composer_replication.traces.readers.messages import add_message, function_tools, is_item, parts_of
from composer_replication.traces.trace_records import (
    Dropped,
    Ledger,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
)


def matches_chat(head: Sequence[Any]) -> str:
    """The version where it is a log of chat completions: rows with messages, or pairs of request and response."""
    first = head[0] if head else None
    if not isinstance(first, dict) or "info" in first or "trajectory_format" in first:
        return ""
    if not _are_messages(at(_request(first), "messages")):
        return ""
    return "completions" if first.get("response") is not None else "rows"


def matches_responses(head: Sequence[Any]) -> str:
    """Likewise for Responses, which take ``input``."""
    request = _request(head[0] if head else None)
    return "responses" if isinstance(at(request, "input"), list | str) and at(request, "model") else ""


def read_chat(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of rows ``{messages, …}``, ``{request, response}``, ``{messages, response}``."""
    joined = ConversationJoiner("openai-chat", name)
    for record in records:
        ledger.put(_chat_row, joined, record)
    yield from joined.traces()


def read_responses(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """Conversations of Responses: input items and output items, streams kept as text too."""
    joined = ConversationJoiner("openai-responses", name)
    for record in records:
        ledger.put(_responses_row, joined, record)
    yield from joined.traces()


class ConversationJoiner:
    """Conversations by the digest of everything that they hold so far, so that a row extends the one that it repeats."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name
        self._builders: list[TraceBuilder] = []
        self._tips: dict[bytes, TraceBuilder] = {}

    def add(self, messages: Sequence[Any], answers: Sequence[Any], tools: Any, model: Any) -> Trace:
        """Add a row: the messages that were sent, and those that came back."""
        chain = list(_digests(messages))
        known = next((n for n in range(len(chain), 0, -1) if chain[n - 1] in self._tips), 0)
        while known > 1 and chain[known - 2] == chain[known - 1]:
            known -= 1  # thoughts have no digest of their own
        if known:
            builder = self._tips.pop(chain[known - 1])
        else:
            builder = TraceBuilder(Trace(f"{self._name}#{len(self._builders)}", self._kind))
            self._builders.append(builder)
        builder.trace.tools = function_tools(tools) or builder.trace.tools
        for message in messages[known:]:
            _add(builder, message)
        builder.close()
        for answer in answers:
            _add(builder, answer, model=model)
        builder.trace.model = builder.trace.model or string(model)
        whole = [*messages, *answers]
        if whole and (known < len(messages) or answers):
            self._tips[list(_digests(whole))[-1]] = builder
        return builder.trace

    def traces(self) -> Iterator[Trace]:
        """What was joined, in the order in which it began."""
        return (builder.trace for builder in self._builders)


def _chat_row(joined: ConversationJoiner, row: dict[str, Any]) -> None:
    request, body = _request(row), _body(row.get("response"))
    messages = items(at(request, "messages"))
    answers = [at(choice, "message") for choice in items(at(body, "choices"))[:1]]
    if not _are_messages(messages):
        raise Dropped("a row without messages")
    tools = at(request, "tools") or at(row, "kwargs", "tools")
    model = string(at(body, "model")) or at(request, "model")
    trace = joined.add(messages, answers, tools, model)
    if task := string(row.get("instance_id")):  # of SWE-bench, beside the messages
        trace.state = RepositoryState(task_id=task)
        trace.passed = flag(row.get("resolved"))


def _responses_row(joined: ConversationJoiner, row: dict[str, Any]) -> None:
    request, body = _request(row), _body(row.get("response"))
    given = at(request, "input")
    if given is None:
        raise Dropped("a row without input")
    if at(request, "previous_response_id"):
        raise Dropped("its context is stored at the provider (previous_response_id)")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else items(given)
    if instructions := string(at(request, "instructions")):
        messages = [{"role": "system", "content": instructions}, *messages]
    model = string(at(body, "model")) or at(request, "model")
    joined.add(messages, items(at(body, "output")), at(request, "tools"), model)


def _add(builder: TraceBuilder, message: Any, **known: Any) -> None:
    """What cannot be added leaves the row's other messages where they are."""
    try:
        add_message(builder, message, **known)
    except (Dropped, AttributeError, TypeError, ValueError):
        return


def _digests(messages: Sequence[Any]) -> Iterator[bytes]:
    """For each message the digest of all up to it: source, texts and calls, however they are spelled; thoughts may be left out."""
    before = b""
    for message in messages:
        if is_item(message):
            known = list(parts_of(message))
            # a call of the server's own tool has result and sources in the answer, and loses them where it is repeated
            is_own = any(isinstance(part, ToolCall) for part in known)
            parts = [_plain(part) for part in known if not (is_own and isinstance(part, StepResult))]
            parts = [message["type"]] if message.get("type") == "web_search_call" else parts
            if any(parts):
                whole = json.dumps(
                    [message.get("role") in ("user", "system", "developer"), *filter(None, parts)]
                )
                before = hashlib.sha256(before + whole.encode()).digest()
        yield before


def _plain(part: Any) -> Any:
    if isinstance(part, ToolCall):
        return [part.name, json.dumps(parsed(part.arguments), sort_keys=True)]
    return part.text if isinstance(part, StepResult) else part if isinstance(part, str) else None


def _request(row: Any) -> Any:
    """The request of a row, whether it stands in it, beside a response or in a batch."""
    request = at(row, "request") or row
    body = parsed(at(request, "body"))
    return body if isinstance(body, dict) else request


def _body(response: Any) -> Any:
    """The response's object; of a stream of events the one that completes it."""
    body = parsed(at(response, "body") or response)
    if not isinstance(body, str):
        return body
    events = (parsed(line[5:].strip()) for line in body.split("\n") if line.startswith("data:"))
    whole = [at(event, "response") for event in events if at(event, "response")]
    return whole[-1] if whole else None


def _are_messages(value: Any) -> bool:
    return bool(items(value)) and all(at(each, "role") is not None for each in value)
