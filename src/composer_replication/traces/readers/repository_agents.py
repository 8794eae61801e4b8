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
from composer_replication.traces.json_values import (
    arguments_text,
    at,
    flag,
    integer,
    items,
    parsed,
    string,
    text_of,
)
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
    if any(at(event, "kind") in _KINDS for event in items(at(head[0], "history"))[:20]):
        return "evaluation"
    return "1" if any(at(event, "kind") in _KINDS for event in head) else ""


def read_openhands(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of all events in the order of their file, and one of each evaluation's row."""
    single = TraceBuilder(Trace(name, "openhands", agent="openhands"))
    for number, record in enumerate(records):
        if not (history := items(at(record, "history"))):
            ledger.put(partial(_event, single), record)
            continue
        ledger.num_records -= 1  # the row counts as its events
        trace = Trace(f"{name}#{number}", "openhands", agent="openhands")
        ledger.put_inner(partial(_event, TraceBuilder(trace)), history)
        task = string(record.get("instance_id") or at(record, "instance", "instance_id"))
        names = (string(at(record, "instance", key)) for key in ("repo", "base_commit"))
        trace.state = RepositoryState(task, *names)
        trace.passed = flag(at(record, "test_result", "report", "resolved"))
        yield trace
    if single.trace.steps:
        yield single.trace


def _event(builder: TraceBuilder, event: dict[str, Any]) -> str | None:
    kind, key = event.get("kind"), event.get("llm_response_id") or None  # parallel calls share it
    if kind == "SystemPromptEvent":
        builder.add("system", [text_of([event.get("system_prompt"), event.get("dynamic_context")])])
        builder.trace.tools = function_tools(event.get("tools"))
    elif kind == "MessageEvent":
        is_answer = event.get("source") == "agent"
        message = {**event["llm_message"], "role": "assistant" if is_answer else "user"}
        parts = [*parts_of(message), text_of(event.get("extended_content"))]
        builder.add("agent" if is_answer else "user", parts, key=key)
    elif kind == "ActionEvent":
        thoughts = {name: event.get(name) for name in ("reasoning_content", "thinking_blocks")}
        answer = {"role": "assistant", "content": event.get("thought"), **thoughts}
        builder.add("agent", [*([] if key in builder.answers else parts_of(answer)), _call(event)], key=key)
    elif kind in ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent"):
        builder.add("user", [_result(event)])
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


def _call(event: dict[str, Any]) -> ToolCall:
    arguments = at(event, "tool_call", "arguments")
    if arguments is None:
        arguments = {key: value for key, value in (event.get("action") or {}).items() if key != "kind"}
    name = string(at(event, "tool_call", "name")) or string(event.get("tool_name"))
    return ToolCall(name, arguments_text(arguments), string(event.get("tool_call_id")))


def _result(event: dict[str, Any]) -> StepResult:
    call_id, observation = string(event.get("tool_call_id")), event.get("observation")
    if not call_id:
        raise Dropped("a result without its call")
    code = integer(at(observation, "exit_code"))
    if event["kind"] != "ObservationEvent":
        refusal = string(event.get("rejection_reason") or event.get("error"))
        return StepResult(call_id, refusal, True, code)
    text, is_error = text_of(at(observation, "content")), flag(at(observation, "is_error"))
    return StepResult(call_id, text, is_error, code)


_BLOCK = re.compile(r"```(?:mswea_bash_command|bash)\n(.*?)\n?```", re.DOTALL)
_RETURNCODE = re.compile(r"<returncode>(-?\d+)</returncode>")


def matches_swe_agent(head: Sequence[Any]) -> str:
    """The version that its ``info`` names."""
    first, history = head[0], items(at(head[0], "history"))
    has_agent = any(at(each, "agent") is not None for each in history[:3])
    is_ours = isinstance(at(first, "trajectory"), list) or has_agent
    is_chat = bool(history) and at(history[0], "role") is not None
    return string(at(first, "info", "swe_agent_version")) or "0" if is_ours and is_chat else ""


def matches_mini_swe_agent(head: Sequence[Any]) -> str:
    """The version, ``1`` where the file does not say it."""
    first = head[0]
    if string(at(first, "trajectory_format")).startswith("mini-swe-agent"):
        return string(at(first, "info", "mini_version")) or "1"
    messages = items(first) or (items(at(first, "messages")) if at(first, "info") is not None else [])
    texts = [text_of(at(each, "content")) for each in messages[:6]]
    is_ours = bool(messages) and all(at(each, "role") is not None for each in messages[:6])
    return "1" if is_ours and any(_BLOCK.search(text) or _RETURNCODE.search(text) for text in texts) else ""


def read_swe_agent(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document; the demonstration inside is flagged ``demo``."""
    for number, document in enumerate(records):
        trace = Trace(f"{name}#{number}", "swe-agent", agent="swe-agent")
        builder = TraceBuilder(trace)
        ledger.put(lambda _: "kept: the document", document)
        trace.version = string(at(document, "info", "swe_agent_version"))
        replay = parsed(at(document, "replay_config"))
        repository = (at(replay, "env", "repo", key) for key in ("github_url", "repo_name", "path"))
        trace.state = RepositoryState(
            string(at(replay, "problem_statement", "id")),
            next(filter(None, map(string, repository)), ""),
            string(at(replay, "env", "repo", "base_commit")),
        )
        trace.model = string(at(replay, "agent", "model", "name"))
        history = items(at(document, "history"))
        ledger.put_inner(partial(_history_message, builder), history)
        num_answers = sum(at(each, "role") == "assistant" and not at(each, "is_demo") for each in history)
        # the last step, which submits, may stand in the trajectory alone
        ledger.put_inner(partial(_trajectory_step, builder), items(at(document, "trajectory"))[num_answers:])
        yield trace


def read_mini_swe_agent(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document."""
    for number, document in enumerate(records):
        builder = TraceBuilder(Trace(f"{name}#{number}", "mini-swe-agent", agent="mini-swe-agent"))
        ledger.put(lambda _: "kept: the document", document)
        ledger.put_inner(partial(_mini_message, builder), items(document) or items(at(document, "messages")))
        trace = builder.trace
        trace.version = string(at(document, "info", "mini_version"))
        trace.model = trace.model or string(at(document, "info", "config", "model", "model_name"))
        trace.state = RepositoryState(folder=string(at(document, "info", "config", "environment", "cwd")))
        trace.prompt_origin = "recorded" if trace.steps else "rebuilt"
        yield trace


def _history_message(builder: TraceBuilder, message: dict[str, Any]) -> None:
    flags = ("demo",) if message.get("is_demo") is True else ()
    call_ids = items(message.get("tool_call_ids"))
    text = text_of(message.get("content"))
    is_user = message.get("role") in ("tool", "user")
    if is_user and (call_ids or (message["role"] == "user" and builder.waits() and not flags)):
        call_id = string(call_ids[0]) if call_ids else ""
        builder.add("user", [StepResult(call_id, text.removeprefix("OBSERVATION:\n"))])
        return
    add_message(builder, message, *flags)
    step = builder.trace.steps[-1]
    if step.source == "agent" and not step.calls and (command := string(message.get("action")).strip()):
        _add_command(builder, command)
        step.text = string(message.get("thought")) or step.text


def _trajectory_step(builder: TraceBuilder, step: dict[str, Any]) -> None:
    builder.add("agent", [string(step.get("thought")) or string(step.get("response"))])
    _add_command(builder, string(step["action"]).strip())
    builder.add("user", [StepResult("", string(step.get("observation")))])


def _mini_message(builder: TraceBuilder, message: dict[str, Any]) -> None:
    extra, role, text = message.get("extra") or {}, message.get("role"), text_of(message.get("content"))
    code, model = integer(at(extra, "returncode")), at(extra, "response", "model")
    if role == "exit" and not builder.waits():
        raise Dropped("the end of the run")
    if role in ("exit", "tool"):
        builder.add("user", [StepResult(string(message.get("tool_call_id")), text, None, code)])
    elif role == "user":
        _mini_user(builder, text, extra, code)
    elif role is None or message.get("object") == "response":
        for item in items(message.get("output")) or [message]:
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
    if builder.waits() and (found or code is not None or "model_response" not in extra):
        code = code if code is not None else int(found[1]) if found else None
        builder.add("user", [StepResult("", text, None, code)])
        return
    choices = items(at(extra, "response", "choices")) or [None]
    # an answer without a call is taken out of the messages
    if answer := string(extra.get("model_response") or at(choices[0], "message", "content")):
        builder.add("agent", [answer], model=at(extra, "response", "model"))
    builder.add("user", [text], *(("injected",) if extra else ()))


def _add_command(builder: TraceBuilder, command: str) -> None:
    """The answer that was just added runs a command that stands in its text."""
    builder.add("agent", [ToolCall("bash", arguments_text({"command": command}), "")], key="")
