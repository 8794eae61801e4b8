"""Events of OpenHands: conversations of version 1, event lists of version 0, and rows of its evaluations.

Version 1 writes one event a file (``events/event-00012-ID.json``), one a line, or a list ``items``; version 0 writes a list, or a
``history`` inside an evaluation's row, whose oldest shape has no ids and pairs an observation with the action before it.
"""

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

_V1_KINDS = {
    "SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "UserRejectObservation", "AgentErrorEvent",
    "Condensation", "ConversationStateUpdateEvent",
}  # fmt: skip
_NOISE = {"agent_state_changed", "null", "change_agent_state", "recall", "condensation"}
_ACTION_TOOLS = {
    "run": "execute_bash", "run_ipython": "execute_ipython_cell", "edit": "str_replace_editor", "read": "str_replace_editor",
}  # fmt: skip


def matches_openhands(head: Sequence[Any]) -> str:
    """``1`` for typed events, ``0`` for event lists, ``evaluation`` for rows with a history."""
    first = head[0] if head else None
    events = items(first) or items(at(first, "items")) or items(at(first, "history")) or list(head)
    if any(at(event, "kind") in _V1_KINDS for event in events[:20]):
        return "1"
    if (
        at(first, "agent")
        and at(first, "workspace") is not None
        and at(first, "execution_status") is not None
    ):
        return "1"  # base_state.json beside the events
    is_old = any(at(event, "action") is not None for event in events[:20])
    is_old = is_old and all(at(event, "role") is None for event in events[:20])
    return (
        ("0" if isinstance(first, list) else "evaluation" if at(first, "history") else "") if is_old else ""
    )


def read_openhands(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of events, or one of each evaluation row."""
    new = _Events(name, "1")
    for number, record in enumerate(records):
        events = items(record) or items(at(record, "history")) or items(at(record, "items"))
        if not events:
            ledger.put(new.take, record)
            continue
        ledger.num_records -= 1  # the list counts as its events
        is_typed = at(events[0], "kind") is not None
        reader = new if is_typed else _Events(f"{name}#{number}", "0")
        ledger.put_inner(reader.take if is_typed else reader.take_old, events)
        if isinstance(record, dict):
            _note_row(reader.builder.trace, record)
        if not is_typed:
            yield reader.builder.trace
    if new.builder.trace.steps:
        yield new.builder.trace


class _Events:
    """Events in the order of their file."""

    def __init__(self, name: str, version: str) -> None:
        self.builder = TraceBuilder(Trace(name, "openhands", version, agent="openhands"))

    def take(self, event: dict[str, Any]) -> str | None:
        """An event of version 1; parallel calls share ``llm_response_id``."""
        kind, builder = event.get("kind"), self.builder
        known = {"stamp": event.get("timestamp")}
        if kind == "SystemPromptEvent":
            builder.add(
                "system", [text_of([event.get("system_prompt"), event.get("dynamic_context")])], **known
            )
            builder.trace.tools = function_tools(event.get("tools"))
        elif kind == "MessageEvent":
            message = event["llm_message"]
            is_answer = event.get("source") == "agent"
            extended = text_of(event.get("extended_content"))
            parts = [*parts_of({**message, "role": "assistant" if is_answer else "user"}), extended]
            builder.add(
                "agent" if is_answer else "user", parts, key=event.get("llm_response_id") or None, **known
            )
        elif kind == "ActionEvent":
            builder.add("agent", self._action(event), key=event.get("llm_response_id") or None, **known)
        elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
            self._observation(event)
        elif kind == "Condensation":
            steps = builder.trace.steps
            place = builder.add("user", [text_of(event.get("summary"))], "compacted", **known)
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

    def take_old(self, event: dict[str, Any]) -> str | None:
        """An event of version 0."""
        action, observation, builder = event.get("action"), event.get("observation"), self.builder
        args = event.get("args") or event
        known = {"stamp": event.get("timestamp")}
        if action in _NOISE or observation in _NOISE:
            return "kept: state of the program"
        if isinstance(observation, str):
            self._old_result(event)
        elif not isinstance(action, str):
            raise Dropped("an event that is neither action nor observation")
        elif action == "system":
            builder.add("system", [string(args.get("content"))], **known)
            builder.trace.tools = function_tools(args.get("tools"))
            builder.trace.version = string(args.get("openhands_version")) or builder.trace.version
        elif (
            action == "message" and event.get("source", "agent" if builder.trace.steps else "user") != "agent"
        ):
            builder.add("user", [string(args.get("content"))], **known)
        else:
            self._old_action(event, action, args)
        return None

    def _old_action(self, event: dict[str, Any], action: str, args: dict[str, Any]) -> None:
        metadata = event.get("tool_call_metadata")
        response = at(metadata, "model_response")
        key = string(at(response, "id"))
        parts: list[Part] = []
        if not self.builder.has_answer(key):
            parts = [
                string(args.get("thought")) or string(args.get("content") if action == "message" else "")
            ]
        if action != "message":
            call_id = string(at(metadata, "tool_call_id"))
            written = [
                c
                for choice in items(at(response, "choices"))
                for c in items(at(choice, "message", "tool_calls"))
            ]
            own = next((each for each in written if at(each, "id") == call_id), None)
            shown = {
                k: v for k, v in args.items() if k not in ("thought", "action", "translated_ipython_code")
            }
            name = string(at(metadata, "function_name")) or _ACTION_TOOLS.get(action, action)
            parts.append(ToolCall(name, arguments_text(at(own, "function", "arguments") or shown), call_id))
        self.builder.add(
            "agent", filter(None, parts), key=key or None, model=at(response, "model"), usage=at(response, "usage"),
            stamp=event.get("timestamp"),
        )  # fmt: skip

    def _old_result(self, event: dict[str, Any]) -> None:
        code = integer(at(event, "extras", "metadata", "exit_code"))
        code = integer(event.get("exit_code")) if code is None else code
        call_id = string(at(event, "tool_call_metadata", "tool_call_id"))
        is_error = True if event["observation"] == "error" else None
        result = StepResult(call_id, text_of(event.get("content")), is_error, None if code == -1 else code)
        self.builder.add("user", [result])


def _note_row(trace: Trace, row: dict[str, Any]) -> None:
    """What an evaluation's row knows of repository and outcome."""
    commit = string(row.get("base_commit") or at(row, "instance", "base_commit"))
    owner = "/".join(filter(None, (string(at(row, "issue", key)) for key in ("owner", "repo"))))
    task = string(row.get("instance_id") or at(row, "instance", "instance_id"))
    trace.state = RepositoryState(task, string(at(row, "instance", "repo")) or owner, commit)
    trace.passed = flag(at(row, "test_result", "report", "resolved"))
