"""Trajectories of SWE-agent (``.traj``) and of mini-swe-agent (``.traj.json``): one document each.

SWE-agent repeats its whole prompt in every step of ``trajectory``: the messages are read from ``history``, where calls have ids.
mini-swe-agent has three shapes: calls, blocks of code in text, and items of Responses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.readers.chat_messages import add_message, usage_of
from composer_replication.traces.readers.response_items import add_item
from composer_replication.traces.trace_records import (
    Ledger,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
    integer,
    items,
    mapping,
    parsed,
    string,
    text_of,
)

_BLOCK = re.compile(r"```(?:mswea_bash_command|bash)\n(.*?)\n?```", re.DOTALL)
_RETURNCODE = re.compile(r"<returncode>(-?\d+)</returncode>")


def matches_swe_agent(head: Sequence[Any]) -> str:
    """The version that its ``info`` names."""
    first = mapping(head[0] if head else None)
    history = items(first.get("history"))
    is_ours = isinstance(first.get("trajectory"), list) or any(
        "agent" in mapping(each) for each in history[:3]
    )
    is_chat = history and "role" in mapping(history[0])
    return string(mapping(first.get("info")).get("swe_agent_version")) or "0" if is_ours and is_chat else ""


def matches_mini_swe_agent(head: Sequence[Any]) -> str:
    """The version, ``1`` where the file does not say it."""
    first = head[0] if head else None
    document = mapping(first)
    if string(document.get("trajectory_format")).startswith("mini-swe-agent"):
        return string(mapping(document.get("info")).get("mini_version")) or "1"
    messages = items(first) or (items(document.get("messages")) if "info" in document else [])
    texts = [text_of(mapping(each).get("content")) for each in messages[:6]]
    is_ours = bool(messages) and all("role" in mapping(each) for each in messages[:6])
    return "1" if is_ours and any(_BLOCK.search(text) or _RETURNCODE.search(text) for text in texts) else ""


def read_swe_agent(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document; the demonstration inside is flagged ``demo``."""
    for number, document in enumerate(map(mapping, records)):
        builder = TraceBuilder(Trace(f"{name}#{number}", "swe-agent", agent="swe-agent"))
        history = items(document.get("history"))
        ledger.num_records += len(history)
        ledger.kept("the document")
        for message in map(mapping, history):
            flags = ("demo",) if message.get("is_demo") is True else ()
            why = _history_message(builder, message, flags)
            ledger.dropped(why) if why else ledger.mapped()
        _note_document(builder.trace, document)
        yield builder.trace


def read_mini_swe_agent(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document."""
    for number, document in enumerate(records):
        builder = TraceBuilder(Trace(f"{name}#{number}", "mini-swe-agent", agent="mini-swe-agent"))
        messages = items(document) or items(mapping(document).get("messages"))
        ledger.num_records += len(messages)
        ledger.kept("the document")
        for message in map(mapping, messages):
            why = _mini_message(builder, message)
            ledger.dropped(why) if why else ledger.mapped()
        info = mapping(mapping(document).get("info"))
        builder.trace.version = string(info.get("mini_version"))
        model = mapping(mapping(info.get("config")).get("model")).get("model_name")
        builder.trace.model = builder.trace.model or string(model)
        builder.trace.prompt_origin = "recorded" if builder.trace.steps[:1] else "rebuilt"
        yield builder.trace


def _history_message(builder: TraceBuilder, message: Mapping[str, Any], flags: tuple[str, ...]) -> str:
    role = message.get("role")
    call_ids = items(message.get("tool_call_ids"))
    text = text_of(message.get("content"))
    previous = builder.trace.steps[-1] if builder.trace.steps else None
    if role in ("tool", "user") and call_ids:
        return builder.result(StepResult(string(call_ids[0]), text.removeprefix("OBSERVATION:\n")))
    if role == "user" and previous is not None and previous.calls and not previous.results and not flags:
        return builder.result(StepResult("", text.removeprefix("OBSERVATION:\n")))
    why = add_message(builder, message, *flags)
    step = builder.open
    if step is not None and not step.calls and string(message.get("action")).strip():
        arguments = json.dumps({"command": string(message["action"]).strip()}, ensure_ascii=False)
        builder.call(step, ToolCall("bash", arguments))
        step.text = string(message.get("thought")) or step.text
    return why


def _note_document(trace: Trace, document: Mapping[str, Any]) -> None:
    info = mapping(document.get("info"))
    trace.version = string(info.get("swe_agent_version"))
    replay = mapping(parsed(document.get("replay_config")))
    repo = mapping(mapping(replay.get("env")).get("repo"))
    address = string(repo.get("github_url")) or string(repo.get("repo_name")) or string(repo.get("path"))
    trace.state = RepositoryState(
        task_id=string(mapping(replay.get("problem_statement")).get("id")),
        repository=address,
        commit=string(repo.get("base_commit")),
    )
    model = mapping(mapping(replay.get("agent")).get("model"))
    trace.model = string(model.get("name"))


def _mini_message(builder: TraceBuilder, message: Mapping[str, Any]) -> str:
    extra = mapping(message.get("extra"))
    code = integer(extra.get("returncode"))
    role = message.get("role")
    if role == "exit":
        return _mini_exit(builder, text_of(message.get("content")))
    if "role" not in message or string(message.get("object")) == "response":
        return _mini_items(builder, message, code)
    text = text_of(message.get("content"))
    if role == "tool":
        return builder.result(StepResult(string(message.get("tool_call_id")), text, None, code))
    if role == "user":
        return _mini_user(builder, text, extra, code)
    why = add_message(builder, message)
    step = builder.open
    if step is not None:
        response = mapping(extra.get("response"))
        step.model, step.usage = string(response.get("model")), usage_of(response.get("usage"))
        builder.trace.model = builder.trace.model or step.model
        if not step.calls and (found := _BLOCK.search(step.text)):
            builder.call(step, ToolCall("bash", json.dumps({"command": found[1]}, ensure_ascii=False)))
    return why


def _mini_user(builder: TraceBuilder, text: str, extra: Mapping[str, Any], code: int | None) -> str:
    """A user's message is the task, the result of the code block before it, or a complaint about an answer without one."""
    previous = builder.trace.steps[-1] if builder.trace.steps else None
    found = _RETURNCODE.search(text)
    waits = previous is not None and previous.source == "agent" and previous.calls and not previous.results
    if waits and (found or code is not None or "model_response" not in extra):
        return builder.result(
            StepResult("", text, None, code if code is not None else int(found[1]) if found else None)
        )
    if answer := string(extra.get("model_response")):  # the answer itself was taken out of the messages
        builder.open = None
        step = builder.answer()
        step.text, step.usage = answer, usage_of(mapping(extra.get("response")).get("usage"))
        step.model = string(mapping(extra.get("response")).get("model"))
    builder.message("user", text, *(("injected",) if extra else ()))
    return ""


def _mini_exit(builder: TraceBuilder, text: str) -> str:
    step = builder.trace.steps[-1] if builder.trace.steps else None
    if step is not None and step.calls and len(step.results) < len(step.calls):
        return builder.result(StepResult("", text))
    return "the end of the run"


def _mini_items(builder: TraceBuilder, message: Mapping[str, Any], code: int | None) -> str:
    why = ""
    for item in map(mapping, items(message.get("output")) or [message]):
        why = add_item(builder, item) or why
    if code is not None and builder.trace.steps and builder.trace.steps[-1].results:
        builder.trace.steps[-1].results[-1].exit_code = code
    return why
