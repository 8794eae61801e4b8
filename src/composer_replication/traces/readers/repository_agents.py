"""What OpenHands (from version 1 on), SWE-agent and mini-swe-agent write, and rows of their evaluations.

OpenHands has one event a file (``events/event-00012-ID.json``), one a line, or rows with a history of them. SWE-agent's ``.traj``
and mini-swe-agent's ``.traj.json`` are one document each. SWE-agent repeats its whole prompt in every step of ``trajectory``: the
messages are read from ``history``, where calls have ids. mini-swe-agent has three shapes: calls, blocks of code in text, and items
of Responses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.json_values import at, items_at, json_text, parsed, text_at, text_of, typed
from composer_replication.traces.readers.messages import add_message, function_tools, parts_of
from composer_replication.traces.trace_records import (
    Dropped,
    Ledger,
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
    if any(at(event, "kind") in _KINDS for event in items_at(head[0], "history")[:20]):
        return "evaluation"
    return "1" if any(at(event, "kind") in _KINDS for event in head) else ""


def read_openhands(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of all events in the order of their file, and one of each evaluation's row."""
    single = TraceBuilder(Trace(name, "openhands", agent="openhands"))
    for number, record in enumerate(records):
        if not (history := items_at(record, "history")):
            ledger.put(partial(_event, single), record)
            continue
        ledger.num_records -= 1  # the row counts as its events
        trace = Trace(f"{name}#{number}", "openhands", agent="openhands")
        ledger.put_inner(partial(_event, TraceBuilder(trace)), history)
        task = text_at(record, "instance_id") or text_at(record, "instance", "instance_id")
        names = (text_at(record, "instance", key) for key in ("repo", "base_commit"))
        trace.state = RepositoryState(task, *names)
        trace.passed = typed(bool, at(record, "test_result", "report", "resolved"))
        yield trace
    if single.trace.steps:
        yield single.trace


def _event(builder: TraceBuilder, event: dict[str, Any]) -> str | None:
    kind, key = event.get("kind"), event.get("llm_response_id") or None  # parallel calls share it
    call_id = text_at(event, "tool_call_id")
    if kind == "SystemPromptEvent":
        builder.add("system", [text_of([event.get("system_prompt"), event.get("dynamic_context")])])
        builder.trace.tools = function_tools(event.get("tools"))
    elif kind == "MessageEvent":
        is_answer = event.get("source") == "agent"
        message = {**event["llm_message"], "role": "assistant" if is_answer else "user"}
        parts = [*parts_of(message), text_of(event.get("extended_content"))]
        builder.add("agent" if is_answer else "user", parts, key=key)
    elif kind == "ActionEvent":
        answer = {"reasoning_content": event.get("reasoning_content"), "content": event.get("thought")}
        given = at(event, "tool_call", "arguments")
        if given is None:
            given = {name: value for name, value in (event.get("action") or {}).items() if name != "kind"}
        tool = text_at(event, "tool_call", "name") or text_at(event, "tool_name")
        thoughts = [] if key in builder.answers else parts_of({"role": "assistant", **answer})
        builder.add("agent", [*thoughts, ToolCall(tool, json_text(given), call_id)], key=key)
    elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
        if not call_id:
            raise Dropped("a result without its call")
        seen = event.get("observation")
        text, is_error = text_of(at(seen, "content")), typed(bool, at(seen, "is_error"))
        if kind != "ObservationEvent":
            text, is_error = text_at(event, "rejection_reason") or text_at(event, "error"), True
        builder.add("user", [StepResult(call_id, text, is_error, typed(int, at(seen, "exit_code")))])
        if kind == "UserRejectObservation" and builder.answered is not None:
            builder.answered.flags.add("denied")
    elif kind == "Condensation":
        steps = builder.trace.steps
        place = builder.add("user", [text_of(event.get("summary"))], "compacted")
        steps[place].parent = 0 if place and steps[0].source == "system" else -1
    elif kind == "ConversationStateUpdateEvent":
        return "kept: state of the conversation"
    else:
        raise Dropped(f"an event of the kind {kind!r:.40}" if kind else "an event without a kind")
    return None


_BLOCK = re.compile(r"```(?:mswea_bash_command|bash)\n(.*?)\n?```", re.DOTALL)
_RETURNCODE = re.compile(r"<returncode>(-?\d+)</returncode>")


def matches_swe_agent(head: Sequence[Any]) -> str:
    """The version that its ``info`` names."""
    first, history = head[0], items_at(head[0], "history")
    has_agent = any(at(each, "agent") is not None for each in history[:3])
    is_ours = isinstance(at(first, "trajectory"), list) or has_agent
    is_chat = bool(history) and at(history[0], "role") is not None
    return text_at(first, "info", "swe_agent_version") or "0" if is_ours and is_chat else ""


def matches_mini_swe_agent(head: Sequence[Any]) -> str:
    """The version, ``1`` where the file does not say it."""
    first = head[0]
    if text_at(first, "trajectory_format").startswith("mini-swe-agent"):
        return text_at(first, "info", "mini_version") or "1"
    messages = _messages(first)[:6] if isinstance(first, list) or at(first, "info") is not None else []
    texts = [text_of(at(each, "content")) for each in messages]
    is_chat = all(at(each, "role") is not None for each in messages)
    return "1" if is_chat and any(_BLOCK.search(text) or _RETURNCODE.search(text) for text in texts) else ""


def read_swe_agent(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document; the demonstration inside is flagged ``demo``."""
    for number, document in enumerate(records):
        ledger.put(lambda _: "kept: the document", document)
        replay = parsed(at(document, "replay_config"))
        repository = (text_at(replay, "env", "repo", key) for key in ("github_url", "repo_name", "path"))
        trace = Trace(f"{name}#{number}", "swe-agent", agent="swe-agent")
        trace.version = text_at(document, "info", "swe_agent_version")
        trace.model = text_at(replay, "agent", "model", "name")
        trace.state = RepositoryState(
            text_at(replay, "problem_statement", "id"),
            next(filter(None, repository), ""),
            text_at(replay, "env", "repo", "base_commit"),
        )
        builder, history = TraceBuilder(trace), items_at(document, "history")
        ledger.put_inner(partial(_history_message, builder), history)
        num_answers = sum(at(each, "role") == "assistant" and not at(each, "is_demo") for each in history)
        # the last step, which submits, may stand in the trajectory alone
        ledger.put_inner(partial(_trajectory_step, builder), items_at(document, "trajectory")[num_answers:])
        yield trace


def read_mini_swe_agent(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document."""
    for number, document in enumerate(records):
        ledger.put(lambda _: "kept: the document", document)
        trace = Trace(f"{name}#{number}", "mini-swe-agent", agent="mini-swe-agent")
        ledger.put_inner(partial(_mini_message, TraceBuilder(trace)), _messages(document))
        trace.version = text_at(document, "info", "mini_version")
        trace.model = trace.model or text_at(document, "info", "config", "model", "model_name")
        trace.state = RepositoryState(folder=text_at(document, "info", "config", "environment", "cwd"))
        trace.prompt_origin = "recorded" if trace.steps else "rebuilt"
        yield trace


def _messages(document: Any) -> list[Any]:
    """Of mini-swe-agent: its first version wrote nothing else."""
    return document if isinstance(document, list) else items_at(document, "messages")


def _history_message(builder: TraceBuilder, message: dict[str, Any]) -> None:
    flags = ("demo",) if message.get("is_demo") is True else ()
    role, call_ids, text = (
        message.get("role"),
        items_at(message, "tool_call_ids"),
        text_of(message.get("content")),
    )
    is_result = role in ("tool", "user") if call_ids else role == "user" and builder.waits and not flags
    if is_result:
        call_id = typed(str, call_ids[0]) or "" if call_ids else ""
        builder.add("user", [StepResult(call_id, text.removeprefix("OBSERVATION:\n"))])
        return
    add_message(builder, message, *flags)
    step = builder.trace.steps[-1]
    if step.source == "agent" and not step.calls and (command := text_at(message, "action").strip()):
        _add_command(builder, command)
        step.text = text_at(message, "thought") or step.text


def _trajectory_step(builder: TraceBuilder, step: dict[str, Any]) -> None:
    builder.add("agent", [text_at(step, "thought") or text_at(step, "response")])
    _add_command(builder, step["action"].strip())
    builder.add("user", [StepResult("", text_at(step, "observation"))])


def _mini_message(builder: TraceBuilder, message: dict[str, Any]) -> None:
    extra, role, text = message.get("extra") or {}, message.get("role"), text_of(message.get("content"))
    code, model = typed(int, at(extra, "returncode")), at(extra, "response", "model")
    if role == "exit" and not builder.waits:
        raise Dropped("the end of the run")
    if role in ("exit", "tool"):
        builder.add("user", [StepResult(text_at(message, "tool_call_id"), text, None, code)])
    elif role == "user":
        _mini_user(builder, text, extra, code)
    elif role is None or message.get("object") == "response":
        for item in items_at(message, "output") or [message]:
            add_message(builder, {"type": "message", **item}, model=model)
        if code is not None and builder.answered is not None:
            builder.answered.results[-1].exit_code = code
    else:
        place = add_message(builder, message, model=model)
        if role == "assistant" and not builder.trace.steps[place].calls and (found := _BLOCK.search(text)):
            _add_command(builder, found[1])


def _mini_user(builder: TraceBuilder, text: str, extra: dict[str, Any], code: int | None) -> None:
    """A user's message is the task, the result of the code block before it, or a complaint about an answer without one."""
    found = _RETURNCODE.search(text)
    if builder.waits and (found or code is not None or "model_response" not in extra):
        code = code if code is not None else int(found[1]) if found else None
        builder.add("user", [StepResult("", text, None, code)])
        return
    choices = items_at(extra, "response", "choices") or [None]
    # an answer without a call is taken out of the messages
    if answer := text_at(extra, "model_response") or text_at(choices[0], "message", "content"):
        builder.add("agent", [answer], model=at(extra, "response", "model"))
    builder.add("user", [text], *(("injected",) if extra else ()))


def _add_command(builder: TraceBuilder, command: str) -> None:
    """The answer that was just added runs a command that stands in its text."""
    builder.add("agent", [ToolCall("bash", json_text({"command": command}), "")], key="")
