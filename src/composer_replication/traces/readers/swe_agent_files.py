"""Trajectories of SWE-agent (``.traj``) and of mini-swe-agent (``.traj.json``): one document each.

SWE-agent repeats its whole prompt in every step of ``trajectory``: the messages are read from ``history``, where calls have ids.
mini-swe-agent has three shapes: calls, blocks of code in text, and items of Responses.
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
    integer,
    items,
    parsed,
    string,
    text_of,
)
from composer_replication.traces.readers.messages import add_message
from composer_replication.traces.trace_records import (
    Dropped,
    Ledger,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
)

_BLOCK = re.compile(r"```(?:mswea_bash_command|bash)\n(.*?)\n?```", re.DOTALL)
_RETURNCODE = re.compile(r"<returncode>(-?\d+)</returncode>")


def matches_swe_agent(head: Sequence[Any]) -> str:
    """The version that its ``info`` names."""
    first = head[0] if head else None
    history = items(at(first, "history"))
    has_agent = any(at(each, "agent") is not None for each in history[:3])
    is_ours = isinstance(at(first, "trajectory"), list) or has_agent
    is_chat = bool(history) and at(history[0], "role") is not None
    return string(at(first, "info", "swe_agent_version")) or "0" if is_ours and is_chat else ""


def matches_mini_swe_agent(head: Sequence[Any]) -> str:
    """The version, ``1`` where the file does not say it."""
    first = head[0] if head else None
    if string(at(first, "trajectory_format")).startswith("mini-swe-agent"):
        return string(at(first, "info", "mini_version")) or "1"
    messages = items(first) or (items(at(first, "messages")) if at(first, "info") is not None else [])
    texts = [text_of(at(each, "content")) for each in messages[:6]]
    is_ours = bool(messages) and all(at(each, "role") is not None for each in messages[:6])
    return "1" if is_ours and any(_BLOCK.search(text) or _RETURNCODE.search(text) for text in texts) else ""


def read_swe_agent(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document; the demonstration inside is flagged ``demo``."""
    for number, document in enumerate(records):
        builder = TraceBuilder(Trace(f"{name}#{number}", "swe-agent", agent="swe-agent"))
        ledger.put(partial(_note_document, builder.trace), document)
        history = items(at(document, "history"))
        ledger.put_inner(partial(_history_message, builder), history)
        num_answers = sum(at(each, "role") == "assistant" and not at(each, "is_demo") for each in history)
        # the last step, which submits, may stand in the trajectory alone
        ledger.put_inner(partial(_trajectory_step, builder), items(at(document, "trajectory"))[num_answers:])
        yield builder.trace


def read_mini_swe_agent(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document."""
    for number, document in enumerate(records):
        builder = TraceBuilder(Trace(f"{name}#{number}", "mini-swe-agent", agent="mini-swe-agent"))
        ledger.put(lambda _: "kept: the document", document)
        ledger.put_inner(partial(_mini_message, builder), items(document) or items(at(document, "messages")))
        trace = builder.trace
        trace.version = string(at(document, "info", "mini_version"))
        trace.model = trace.model or string(at(document, "info", "config", "model", "model_name"))
        trace.prompt_origin = "recorded" if trace.steps else "rebuilt"
        yield trace


def _note_document(trace: Trace, document: dict[str, Any]) -> str:
    trace.version = string(at(document, "info", "swe_agent_version"))
    replay = parsed(document.get("replay_config"))
    repository = (at(replay, "env", "repo", key) for key in ("github_url", "repo_name", "path"))
    trace.state = RepositoryState(
        string(at(replay, "problem_statement", "id")),
        next(filter(None, map(string, repository)), ""),
        string(at(replay, "env", "repo", "base_commit")),
    )
    trace.model = string(at(replay, "agent", "model", "name"))
    return "kept: the document"


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
