"""Events of OpenHands from version 1 on: one event a file (``events/event-00012-ID.json``), one a line, or rows of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.json_values import arguments_text, at, flag, integer, items, string, text_of
from composer_replication.traces.readers.messages import function_tools, parts_of
from composer_replication.traces.trace_records import (
    Dropped,
    Ledger,
    Part,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
)

_KINDS = {
    "SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "UserRejectObservation", "AgentErrorEvent",
    "Condensation", "ConversationStateUpdateEvent",
}  # fmt: skip


def matches_openhands(head: Sequence[Any]) -> str:
    """``1`` for typed events, ``evaluation`` for rows with a history of them."""
    history = items(at(head[0] if head else None, "history"))
    if any(at(event, "kind") in _KINDS for event in history[:20]):
        return "evaluation"
    return "1" if any(at(event, "kind") in _KINDS for event in head) else ""


def read_openhands(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of all events, and one of each evaluation's row."""
    single = _Events(name)
    for number, record in enumerate(records):
        if not (history := items(at(record, "history"))):
            ledger.put(single.take, record)
            continue
        ledger.num_records -= 1  # the row counts as its events
        row = _Events(f"{name}#{number}")
        ledger.put_inner(row.take, history)
        _note_row(row.builder.trace, record)
        yield row.builder.trace
    if single.builder.trace.steps:
        yield single.builder.trace


class _Events:
    """Events in the order of their file; parallel calls share ``llm_response_id``."""

    def __init__(self, name: str) -> None:
        self.builder = TraceBuilder(Trace(name, "openhands", agent="openhands"))

    def take(self, event: dict[str, Any]) -> str | None:
        kind, builder = event.get("kind"), self.builder
        if kind == "SystemPromptEvent":
            builder.add("system", [text_of([event.get("system_prompt"), event.get("dynamic_context")])])
            builder.trace.tools = function_tools(event.get("tools"))
        elif kind == "MessageEvent":
            message = event["llm_message"]
            is_answer = event.get("source") == "agent"
            extended = text_of(event.get("extended_content"))
            parts = [*parts_of({**message, "role": "assistant" if is_answer else "user"}), extended]
            builder.add("agent" if is_answer else "user", parts, key=event.get("llm_response_id") or None)
        elif kind == "ActionEvent":
            builder.add("agent", self._action(event), key=event.get("llm_response_id") or None)
        elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
            self._observation(event)
        elif kind == "Condensation":
            steps = builder.trace.steps
            place = builder.add("user", [text_of(event.get("summary"))], "compacted")
            steps[place].parent = 0 if place and steps[0].source == "system" else -1
        elif kind == "ConversationStateUpdateEvent":
            return "kept: state of the conversation"
        else:
            raise Dropped(f"an event of the kind {kind!r:.40}" if kind else "an event without a kind")
        return None

    def _action(self, event: dict[str, Any]) -> Iterator[Part]:
        answer = {"role": "assistant", "content": event.get("thought")}
        answer |= {key: event.get(key) for key in ("reasoning_content", "thinking_blocks")}
        written, action = event.get("tool_call"), event.get("action")
        if not self.builder.has_answer(event.get("llm_response_id")):  # parallel calls repeat it
            yield from parts_of(answer)
        arguments = at(written, "arguments")
        if arguments is None:
            arguments = {key: value for key, value in (action or {}).items() if key != "kind"}
        name = string(at(written, "name")) or string(event.get("tool_name"))
        yield ToolCall(name, arguments_text(arguments), string(event.get("tool_call_id")))

    def _observation(self, event: dict[str, Any]) -> None:
        call_id, observation = string(event.get("tool_call_id")), event.get("observation")
        if not call_id:
            raise Dropped("a result without its call")
        refusal = string(event.get("rejection_reason") or event.get("error"))
        is_error = True if event["kind"] != "ObservationEvent" else flag(at(observation, "is_error"))
        text = text_of(at(observation, "content")) if event["kind"] == "ObservationEvent" else refusal
        code = integer(at(observation, "exit_code"))
        self.builder.add("user", [StepResult(call_id, text, is_error, code)])
        if event["kind"] == "UserRejectObservation" and self.builder.answered is not None:
            self.builder.answered.flags.add("denied")


def _note_row(trace: Trace, row: dict[str, Any]) -> None:
    """What an evaluation's row knows of repository and outcome."""
    instance = row.get("instance")
    task = string(row.get("instance_id") or at(instance, "instance_id"))
    names = (string(at(instance, key)) for key in ("repo", "base_commit"))
    trace.state = RepositoryState(task, *names)
    trace.passed = flag(at(row, "test_result", "report", "resolved"))
