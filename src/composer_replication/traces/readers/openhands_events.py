"""Events of OpenHands: conversations of version 1, event lists of version 0, and rows of its evaluations.

Version 1 writes one event a file (``events/event-00012-ID.json``), one a line, or a list ``items``; version 0 writes a list, or a
``history`` inside an evaluation's row, whose oldest shape has no ids and pairs an observation with the action before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.readers.chat_messages import fill_answer, function_tools, usage_of
from composer_replication.traces.trace_records import (
    Ledger,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
    TraceStep,
    arguments_text,
    integer,
    items,
    mapping,
    string,
    text_of,
)

_V1_KINDS = {
    "SystemPromptEvent",
    "MessageEvent",
    "ActionEvent",
    "ObservationEvent",
    "UserRejectObservation",
    "AgentErrorEvent",
    "Condensation",
    "ConversationStateUpdateEvent",
}
_NOISE = {"agent_state_changed", "null", "change_agent_state", "recall", "condensation"}
_ACTION_TOOLS = {
    "run": "execute_bash",
    "run_ipython": "execute_ipython_cell",
    "edit": "str_replace_editor",
    "read": "str_replace_editor",
}


def matches_openhands(head: Sequence[Any]) -> str:
    """``1`` for typed events, ``0`` for event lists, ``evaluation`` for rows with a history."""
    first = head[0] if head else None
    events = items(first) or items(mapping(first).get("items")) or list(head)
    kinds = {string(mapping(event).get("kind")) for event in events[:20]}
    if kinds & _V1_KINDS:
        return "1"
    if mapping(first).get("agent") and "workspace" in mapping(first) and "execution_status" in mapping(first):
        return "1"  # base_state.json beside the events
    if _are_old_events(items(first)):
        return "0"
    return "evaluation" if _are_old_events(items(mapping(first).get("history"))) else ""


def read_openhands(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of events, or one of each evaluation row."""
    new = _NewEvents(Trace(name, "openhands", "1", agent="openhands"), ledger)
    for number, record in enumerate(records):
        row = mapping(record)
        if isinstance(record, list) or "history" in row:
            events = items(record) or items(row.get("history"))
            ledger.num_records += len(events) - 1
            if not events:
                ledger.num_records += 1
                ledger.dropped("a conversation without events")
            is_typed = string(mapping(events[0]).get("kind")) if events else ""
            if is_typed:
                for event in map(mapping, events):
                    new.take(event)
                new.note_row(row)
            else:
                yield _old_trace(events, row, ledger, f"{name}#{number}")
        elif isinstance(row.get("items"), list):
            ledger.num_records += len(row["items"]) - 1
            for event in map(mapping, row["items"]):
                new.take(event)
        else:
            new.take(row)
    if new.builder.trace.steps:
        yield new.builder.trace


class _NewEvents:
    """Events of version 1, in the order of their file."""

    def __init__(self, trace: Trace, ledger: Ledger) -> None:
        self.builder, self._ledger = TraceBuilder(trace), ledger
        self._answers: dict[str, TraceStep] = {}

    def note_row(self, row: Mapping[str, Any]) -> None:
        _note_row(self.builder.trace, row)

    def take(self, event: Mapping[str, Any]) -> None:
        kind = string(event.get("kind"))
        stamp = string(event.get("timestamp"))
        builder, why = self.builder, ""
        if kind == "SystemPromptEvent":
            text = [event.get("system_prompt"), event.get("dynamic_context")]
            builder.message("system", text_of(text), timestamp=stamp)
            builder.trace.tools = [_as_function(each) for each in map(mapping, items(event.get("tools")))]
        elif kind == "MessageEvent":
            self._message(event, stamp)
        elif kind == "ActionEvent":
            self._action(event, stamp)
        elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
            why = self._observation(event, kind)
        elif kind == "Condensation":
            place = builder.message("user", text_of(event.get("summary")), "compacted", timestamp=stamp)
            builder.trace.steps[place].parent = 0 if builder.trace.steps[0].source == "system" else -1
        elif kind == "ConversationStateUpdateEvent":
            self._ledger.kept("state of the conversation")
            return
        else:
            why = f"an event of the kind {kind!r:.40}" if kind else "an event without a kind"
        self._ledger.dropped(why) if why else self._ledger.mapped()

    def _message(self, event: Mapping[str, Any], stamp: str) -> None:
        message = mapping(event.get("llm_message"))
        text = text_of([message.get("content"), event.get("extended_content")])
        if event.get("source") != "agent":
            self.builder.message("user", text, timestamp=stamp)
            return
        step = self._answer(event, stamp)
        step.text = text
        fill_answer(self.builder, step, message)

    def _answer(self, event: Mapping[str, Any], stamp: str) -> TraceStep:
        """The answer that an event is of: parallel calls share ``llm_response_id``."""
        answer_id = string(event.get("llm_response_id"))
        step = self._answers.get(answer_id) if answer_id else None
        if step is None:
            step = TraceStep("agent", timestamp=stamp)
            self.builder.add(step)
            self._answers[answer_id] = step
        return step

    def _action(self, event: Mapping[str, Any], stamp: str) -> None:
        step = self._answer(event, stamp)
        step.text = step.text or text_of(event.get("thought"))
        if not step.reasoning:
            fill_answer(self.builder, step, {**event, "tool_calls": None})
        written = mapping(event.get("tool_call"))
        action = {key: value for key, value in mapping(event.get("action")).items() if key != "kind"}
        name = string(written.get("name")) or string(event.get("tool_name"))
        arguments = arguments_text(written.get("arguments", action))
        self.builder.call(step, ToolCall(name, arguments, string(event.get("tool_call_id"))))

    def _observation(self, event: Mapping[str, Any], kind: str) -> str:
        observation = mapping(event.get("observation"))
        call_id = string(event.get("tool_call_id"))
        if kind == "UserRejectObservation":
            result = StepResult(call_id, string(event.get("rejection_reason")), is_error=True)
        elif kind == "AgentErrorEvent":
            result = StepResult(call_id, string(event.get("error")), is_error=True)
        else:
            is_error = observation.get("is_error")
            result = StepResult(
                call_id,
                text_of(observation.get("content")),
                is_error if isinstance(is_error, bool) else None,
                integer(observation.get("exit_code")),
            )
        why = self.builder.result(result) if call_id else "a result without its call"
        if kind == "UserRejectObservation" and not why:
            for step in self.builder.trace.steps:
                if any(each is result for each in step.results):
                    step.flags.add("denied")
        return why


def _old_trace(events: Sequence[Any], row: Mapping[str, Any], ledger: Ledger, name: str) -> Trace:
    builder = TraceBuilder(Trace(name, "openhands", "0", agent="openhands"))
    seen: dict[str, TraceStep] = {}
    for event in map(mapping, events):
        why = _old_event(builder, event, seen)
        if why.startswith("kept "):
            ledger.kept(why.removeprefix("kept "))
        elif why:
            ledger.dropped(why)
        else:
            ledger.mapped()
    _note_row(builder.trace, row)
    return builder.trace


def _old_event(builder: TraceBuilder, event: Mapping[str, Any], seen: dict[str, TraceStep]) -> str:
    action, observation = event.get("action"), event.get("observation")
    args = mapping(event.get("args")) or event
    if string(action) in _NOISE or string(observation) in _NOISE:
        return "kept state of the program"
    if isinstance(observation, str):
        return _old_result(builder, event)
    if not isinstance(action, str):
        return "an event that is neither action nor observation"
    stamp = string(event.get("timestamp"))
    if action == "system":
        builder.message("system", string(args.get("content")), timestamp=stamp)
        builder.trace.tools = function_tools(args.get("tools"))
        builder.trace.version = string(args.get("openhands_version")) or builder.trace.version
    elif (
        action == "message" and event.get("source", "user" if not builder.trace.steps else "agent") != "agent"
    ):
        builder.message("user", string(args.get("content")), timestamp=stamp)
    else:
        _old_action(builder, event, action, args, seen)
    return ""


def _old_action(
    builder: TraceBuilder,
    event: Mapping[str, Any],
    action: str,
    args: Mapping[str, Any],
    seen: dict[str, TraceStep],
) -> None:
    metadata = mapping(event.get("tool_call_metadata"))
    response = mapping(metadata.get("model_response"))
    answer_id = string(response.get("id"))
    step = seen.get(answer_id) if answer_id else None
    if step is None:
        step = TraceStep(
            "agent", timestamp=string(event.get("timestamp")), model=string(response.get("model"))
        )
        builder.add(step)
        builder.trace.model = builder.trace.model or step.model
        if answer_id:
            seen[answer_id] = step
        step.usage = usage_of(response.get("usage"))
        step.text = string(args.get("thought")) or string(args.get("content") if action == "message" else "")
    written = [
        mapping(each)
        for choice in items(response.get("choices"))
        for each in items(mapping(mapping(choice).get("message")).get("tool_calls"))
    ]
    call_id = string(metadata.get("tool_call_id"))
    own = next((each for each in written if each.get("id") == call_id), {})
    if action != "message":
        shown = {k: v for k, v in args.items() if k not in ("thought", "action", "translated_ipython_code")}
        arguments = mapping(own.get("function")).get("arguments") or json.dumps(shown, default=str)
        name = string(metadata.get("function_name")) or _ACTION_TOOLS.get(action, action)
        builder.call(step, ToolCall(name, arguments_text(arguments), call_id))


def _old_result(builder: TraceBuilder, event: Mapping[str, Any]) -> str:
    extras = mapping(event.get("extras"))
    code = integer(mapping(extras.get("metadata")).get("exit_code"))
    code = integer(event.get("exit_code")) if code is None else code
    call_id = string(mapping(event.get("tool_call_metadata")).get("tool_call_id"))
    is_error = True if event.get("observation") == "error" else None
    return builder.result(
        StepResult(call_id, text_of(event.get("content")), is_error, None if code == -1 else code)
    )


def _note_row(trace: Trace, row: Mapping[str, Any]) -> None:
    """What an evaluation's row knows of repository and outcome."""
    instance = mapping(row.get("instance"))
    commit = string(row.get("base_commit")) or string(instance.get("base_commit"))
    issue = mapping(row.get("issue"))
    repository = string(instance.get("repo")) or "/".join(
        filter(None, map(string, (issue.get("owner"), issue.get("repo"))))
    )
    task = string(row.get("instance_id")) or string(instance.get("instance_id"))
    if commit or repository or task:
        trace.state = RepositoryState(task, repository, commit)
    resolved = mapping(mapping(row.get("test_result")).get("report")).get("resolved")
    trace.passed = resolved if isinstance(resolved, bool) else None


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's definition as chat completions have it; version 1 writes its own or theirs."""
    known = function_tools([tool])
    if known:
        return known[0]
    name = string(tool.get("title")) or string(tool.get("kind"))
    return {
        "type": "function",
        "function": {"name": name, "description": string(tool.get("description")), "parameters": {}},
    }


def _are_old_events(value: Sequence[Any]) -> bool:
    rows = [mapping(each) for each in value[:20]]
    return bool(rows) and any("action" in row for row in rows) and all("role" not in row for row in rows)
