"""What coding agents write themselves: Claude Code, Codex, Gemini CLI, OpenHands, SWE-agent and mini-swe-agent.

Claude Code spreads one answer over lines with one ``message.id``, in the order of the file. Of Codex only response items become
steps: events repeat them. SWE-agent repeats its prompt in every step of ``trajectory``: the messages are read from ``history``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces import json_values as values
from composer_replication.traces.json_values import at, first_text, items_at, text_at, text_of, typed
from composer_replication.traces.readers import messages as chat
from composer_replication.traces.trace_records import Dropped, Ledger, StepResult, Trace, TraceStep

_CLAUDE = chat.NAMES["claude-code"]
_INTERRUPTED = "[Request interrupted by user"


def read_claude_code(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """The session and each of its sub-agents: of a file of their own, of side-chain or of progress records."""
    session = _Session(name)
    ledger.take(session.take, records)
    yield from (trace for trace in session.traces.values() if trace.steps)


class _Session:
    """``traces`` has one conversation for the session (key ""), and one for each sub-agent by its id."""

    def __init__(self, name: str) -> None:
        self.traces, self._name, self._call_of_agent = dict[str, Trace](), name, dict[str, str]()
        self._step_of: dict[Any, tuple[str, int]] = {None: ("", -1)}  # a message without a parent begins anew

    def take(self, record: dict[str, Any]) -> str | None:
        kind, uuid, data = record.get("type"), record.get("uuid"), at(record, "data")
        known = self._step_of.get(parent := record.get("parentUuid", ""))
        if known is not None and uuid and (parent or not self.traces):
            self._step_of.setdefault(uuid, known)  # the chain runs through records that are no messages
        if kind in ("assistant", "user"):
            inner = text_at(record, "agentId") or (known or [""])[0] or str(uuid)  # its first record names it
            self._message(record, inner if record.get("isSidechain") is True else "")
        elif at(data, "type") == "agent_progress" and at(data, "message", "type") in ("user", "assistant"):
            self._call_of_agent.setdefault(data["agentId"], text_at(record, "parentToolUseID"))
            self._message({**record, **data["message"], "parentUuid": None}, data["agentId"])
        elif kind == "system" and record.get("subtype") == "compact_boundary":
            self._step_of[uuid] = ("", -1)
            return "kept: border of a compaction"
        else:
            is_known = kind in _CLAUDE["kinds"]
            raise Dropped(f"{kind} record" if is_known else f"a record of the kind {kind!r:.40}")
        return None

    def _message(self, record: dict[str, Any], agent: str) -> None:
        uuid, message, is_user = record.get("uuid"), record["message"], record["type"] == "user"
        if uuid and (agent, uuid) in self._step_of:
            raise Dropped("a record that the file repeats")
        if (trace := self.traces.get(agent)) is None:
            session = text_at(record, "sessionId") or self._name
            self.traces[agent] = trace = Trace(f"{session}/{agent}" if agent else session, "claude-code")
            chat.note_facts(trace, record)
            trace.parent = (session, self._call_of_agent.get(agent, "")) if agent else None
        step = chat.said_in(message["content"])
        step.source = "user" if is_user else "agent"
        step.flags.update([flag for name, flag in _CLAUDE["flags"].items() if record.get(name) is True])
        step.flags |= {"synthetic"} if message.get("model") == "<synthetic>" else set()
        if is_user and _INTERRUPTED in step.text:
            said = [step.text, *(text_at(each, "text") for each in items_at(message, "content"))]
            if any(text.startswith(_INTERRUPTED) for text in said):
                step.flags.add("injected")
                trace.interrupt()
        of_agent, parent = self._step_of.get(record.get("parentUuid", ""), (None, None))
        parent, key = parent if of_agent == agent else None, message.get("id") or uuid or ""
        place = trace.add(step, key=key, parent=parent, model=message.get("model"))
        if is_user and trace.answered and record.get("toolDenialKind"):
            trace.answered.flags.add("denied")
        self._step_of[uuid] = self._step_of[agent, uuid] = (agent, place)


def read_codex(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """The one conversation of a rollout, whose own records begin at the ordinal ``first_own``."""
    trace, model, first_own = Trace(name, "codex"), "", None

    def take(record: dict[str, Any]) -> str | None:
        nonlocal model, first_own
        kind, payload = record.get("type") or record.get("record_type"), record.get("payload")
        event = at(payload, "type") if kind == "event_msg" else None
        if kind is None and "id" in record and "role" not in record:  # the first line was without an envelope
            kind, payload = "session_meta", record
        if kind == "session_meta":
            if first_own is None:  # others speak of the sessions from which this one was forked
                first_own = typed(int, at(payload, "subagent_history_start_ordinal")) or 0
                chat.note_facts(trace, payload)
                parent = text_at(payload, "source", "subagent", "thread_spawn", "parent_thread_id")
                trace.parent = (parent, "") if parent else None
                if text := text_at(payload, "base_instructions", "text") or text_at(payload, "instructions"):
                    trace.add(TraceStep("system", text))
            return "kept: metadata of the session"
        if kind == "turn_context":
            model = text_at(payload, "model") or model
            return "kept: context of a turn"
        if event == "turn_aborted":
            trace.interrupt()
            return "kept: interruption"
        if kind == "token_usage_record" or event == "token_count":
            trace.answers.pop("", None)
            raise Dropped("token counts")
        if kind == "compacted":  # the conversation goes on from what this gives in place of its history
            first, history = len(trace.steps), items_at(payload, "replacement_history")
            summary = {"role": "user", "content": text_of(record["payload"].get("message"))}
            trace.answers.pop("", None)  # what the record gives is no part of the answer under way
            for item in [each for each in history if chat.is_item(each)] or [summary]:
                chat.add_message(trace, {"type": "message", **item}, "compacted", "copied")
            trace.steps[first].parent = -1
            trace.answers.pop("", None)
            return None
        if kind == "response_item" or (chat.is_item(record) and "payload" not in record):
            item = typed(dict, payload) or record
        else:
            raise Dropped(chat.NAMES["codex"]["repeats"].get(str(kind), f"a record of the kind {kind!r:.40}"))
        flags = ["copied"] if (typed(int, record.get("ordinal")) or 0) < (first_own or 0) else []
        item = {"type": "message", **item}  # without "type" a message would begin an answer of its own
        chat.add_message(trace, item, *flags, model=model or record.get("model"))
        return None

    ledger.take(take, records)
    trace.prompt_origin = "rebuilt"  # the schemas of the tools are not in the file
    yield trace


def read_gemini(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """The one conversation of a session: a document, or lines of which a later one with the same id is the newer state."""
    trace, messages = Trace(name, "gemini-cli"), dict[str, Any]()

    def take(record: dict[str, Any]) -> str:
        trace.trace_id = text_at(record, "sessionId") or trace.trace_id
        if (first := record.get("$rewindTo")) is not None:
            ids = [*messages]  # an id that is not there takes everything back
            for each in ids[ids.index(first) if first in ids else 0 :]:
                del messages[each]
            return "kept: messages that were taken back"
        inner = items_at(record, "messages") or items_at(record, "$set", "messages")
        messages.update({each["id"]: each for each in (inner or [record] * ("id" in record))})
        return "kept: the document, or a state of a message"

    def add(message: dict[str, Any]) -> None:
        calls = items_at(message, "toolCalls")
        if (kind := message.get("type")) not in ("user", "gemini"):
            raise Dropped(f"a message of the kind {kind!r:.40}")
        thoughts = [f"{each['subject']}: {each['description']}" for each in items_at(message, "thoughts")]
        said = {"role": kind, "content": message.get("content"), "reasoning": thoughts, "tool_calls": calls}
        step = chat.said_in(said)
        for call in (call for call in calls if call.get("result")):
            answers = (at(each, "functionResponse", "response") for each in items_at(call, "result"))
            text = "\n".join(map(text_of, answers))
            failed = call.get("status") != "success"
            step.results.append(StepResult(text_at(call, "id"), text, failed, chat.exit_code_in(text)))
        step.flags |= {"denied"} if any(call.get("status") == "cancelled" for call in calls) else set()
        trace.add(step, model=message.get("model"))

    ledger.take(take, records)
    ledger.take(add, messages.values(), are_inner=True)
    yield trace


def read_openhands(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of all events in the order of their file, and one of each evaluation's row."""
    single, places = Trace(name, "openhands"), {"__root__": -1}
    for number, record in enumerate(records):
        if not (history := typed(list, record) or items_at(record, "history") or items_at(record, "items")):
            ledger.take(partial(_event, single, places), [record])
            continue
        ledger.num_records -= 1  # the row counts as its events
        trace = Trace(f"{name}#{number}", "openhands")
        ledger.take(partial(_event, trace, {"__root__": -1}), history, are_inner=True)
        chat.note_facts(trace, record)
        if repository := text_at(record, "issue", "repo"):
            trace.repository = f"{text_at(record, 'issue', 'owner')}/{repository}"
        trace.passed = typed(bool, at(record, "test_result", "report", "resolved"))
        yield trace
    if single.steps:
        yield single


def _event(trace: Trace, places: dict[Any, int], event: dict[str, Any]) -> str | None:
    """Of version 1, of which later ones name the event before; ``places`` has the step of each by its id."""
    kind, key = event.get("kind"), event.get("llm_response_id") or None  # parallel calls share it
    call_id, seen, own_id = text_at(event, "tool_call_id"), event.get("observation"), event.get("id") or ""
    if (parent := places.get(event.get("parent_id"))) is not None:
        places.setdefault(own_id, parent)
    message: dict[str, Any]
    match kind:
        case "SystemPromptEvent":
            message = {"role": "system"}
            message["content"] = [event.get("system_prompt"), event.get("dynamic_context")]
            trace.tools = chat.function_tools(event.get("tools"))
        case "MessageEvent":
            said, role = event["llm_message"], "assistant" if event.get("source") == "agent" else "user"
            message = {**said, "role": role, "content": [said.get("content"), event.get("extended_content")]}
        case "ActionEvent":
            said = {} if key in trace.answers else {**event, "content": event.get("thought")}
            called = {"name": event.get("tool_name"), **event["tool_call"], "id": call_id}
            message = {**said, "role": "agent", "tool_calls": [called]}
        case "ObservationEvent" | "UserRejectObservation" | "AgentErrorEvent":
            failure = {"content": first_text(event, "rejection_reason", "error"), "is_error": True}
            said = (seen or {}) if kind == "ObservationEvent" else failure
            message = {**said, "role": "tool", "tool_call_id": call_id}
        case "Condensation":
            message = {"role": "user", "content": event.get("summary")}
        case "ConversationStateUpdateEvent":
            return "kept: state of the conversation"
        case None:
            return _old_event(trace, event)
        case _:
            raise Dropped(f"an event of the kind {kind!r:.40}")
    places[own_id] = place = trace.add(chat.said_in(message), key=key, parent=parent)
    if kind == "UserRejectObservation" and trace.answered:
        trace.answered.flags.add("denied")
    elif kind == "Condensation":
        trace.steps[place].flags.add("compacted")
        trace.steps[place].parent = 0 if place and trace.steps[0].source == "system" else -1
    return None


def _old_event(trace: Trace, event: dict[str, Any]) -> str | None:
    """Of version 0: an action, beside which the model's answer stands from 2025 on, or what was observed after it."""
    seen, call, given = event.get("observation"), event.get("tool_call_metadata"), event.get("args") or event
    answer, text, names = at(call, "model_response"), text_at(given, "content"), chat.NAMES["openhands"]
    if (kind := seen or event.get("action")) in names["no_steps"] or not isinstance(kind, str):
        raise Dropped(f"an event of the kind {kind!r:.40}" if kind else "an event without a kind")
    key, message = "", dict[str, Any]()
    if seen:
        extras = event.get("extras")
        codes = (typed(int, at(each, "exit_code")) for each in (event, extras, at(extras, "metadata")))
        code = next((each for each in codes if each not in (None, -1)), None)  # -1: it runs on
        shown = {"content": text_at(event, "content"), "is_error": seen == "error" or None, "exit_code": code}
        message = {**shown, "role": "tool", "tool_call_id": text_at(call, "tool_call_id")}
    elif kind == "system":
        message = {"role": "system", "content": text}
        trace.tools = chat.function_tools(given.get("tools"))
    elif kind == "message":
        message = {"role": "agent" if event.get("source") == "agent" else "user", "content": text}
    elif key := text_at(answer, "id"):
        if key in trace.answers:
            return "kept: another call of an answer"
        message = {**at(answer, "choices", "0", "message"), "role": "assistant"}
    else:
        arguments = {name: given[name] for name in ("command", "code", "path", "content") if name in given}
        called = {"name": names["tools"].get(kind, kind), "arguments": arguments}
        message = {"role": "agent", "content": text_at(given, "thought"), "tool_calls": [called]}
    trace.add(chat.said_in(message), key=key or None, model=at(answer, "model"))
    return None


_CODE_BLOCK = re.compile(r"```(?:mswea_bash_command|bash)\n(.*?)\n?```", re.DOTALL)
_RETURN_CODE = re.compile(r"<returncode>(-?\d+)</returncode>")


def has_code_blocks(messages: list[Any]) -> bool:
    """Whether these are messages of a chat in which an agent acts by blocks of code, as mini-swe-agent's do."""
    texts = [text_of(at(each, "content")) for each in messages]
    is_chat = all(at(each, "role") is not None for each in messages)
    return is_chat and any(_CODE_BLOCK.search(text) or _RETURN_CODE.search(text) for text in texts)


def read_documents(kind: str, records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document; the demonstration inside one of SWE-agent is flagged ``demo``."""
    tries = ((each, record) for record in records for each in (record, *items_at(record, "attempts")))
    for number, (document, whole) in enumerate(tries):  # the best stands beside the others
        ledger.take(lambda _: "kept: the document", [document], are_inner=document is not whole)
        trace = Trace(f"{name}#{number}", kind)
        # the first version of mini-swe-agent wrote a list of messages and nothing else
        messages = typed(list, document) or items_at(document, "history") or items_at(document, "messages")
        ledger.take(partial(_message, trace), messages, are_inner=True)
        num_answers = sum(at(each, "role") == "assistant" and not at(each, "is_demo") for each in messages)
        # the last step, which submits, or what it printed, may stand in the trajectory alone
        rest = items_at(document, "trajectory")[num_answers - trace.waits :]
        ledger.take(partial(_trajectory_step, trace), rest, are_inner=True)
        trace.model = trace.model or text_at(document, "info", "config", "model", "model_name")
        replay = values.parsed(at(document, "replay_config") or at(whole, "replay_config"))
        chat.note_facts(trace, {"info": at(document, "info"), "replay": replay})
        trace.prompt_origin = "recorded" if trace.steps else "rebuilt"
        yield trace


def _message(trace: Trace, message: dict[str, Any]) -> None:
    """Results come as messages of a tool or, for a command in the text of the answer before, as the user's."""
    extra, role, text = message.get("extra") or {}, message.get("role"), text_of(message.get("content"))
    code, model = typed(int, at(extra, "returncode")), at(extra, "response", "model")
    call_ids, found = items_at(message, "tool_call_ids"), _RETURN_CODE.search(text)
    is_demo, is_user = message.get("is_demo") is True, role == "user"
    is_result = role in ("exit", "tool") or bool(call_ids and is_user)
    if role == "exit" and not trace.waits:
        raise Dropped("the end of the run")
    if is_user and trace.waits and not (is_demo or is_result):
        is_result = bool(found) or code is not None or "model_response" not in extra
        code = code if code is not None else int(found[1]) if found else None
    if is_result:
        call_id = typed(str, call_ids[0]) or "" if call_ids else text_at(message, "tool_call_id")
        result = StepResult(call_id, text.removeprefix("OBSERVATION:\n"), None, code)
        trace.add(TraceStep("user", results=[result]))
    elif role is None or message.get("object") == "response":
        for item in items_at(message, "output") or [message]:
            chat.add_message(trace, {"type": "message", **item}, model=model)
        if code is not None and trace.answered:
            trace.answered.results[-1].exit_code = code
    else:  # an answer without a call is taken out of the messages: a complaint about it holds it
        said = at(extra, "response", "choices", "0", "message", "content")
        taken_out = text_at(extra, "model_response") or typed(str, said) or ""
        if is_user and taken_out:
            trace.add(TraceStep("agent", taken_out), model=model)
        flags = ["demo"] * is_demo + ["injected"] * bool(is_user and extra)
        step = trace.steps[chat.add_message(trace, message, *flags, model=model)]
        block = _CODE_BLOCK.search(text) if trace.format == "mini-swe-agent" else None
        command = text_at(message, "action").strip() or (block[1] if block else "")
        if step.source == "agent" and not step.calls and command:
            call = ToolCall("bash", values.json_text({"command": command}))
            trace.add(TraceStep("agent", calls=[call]), key="")
            step.text = text_at(message, "thought") or step.text


def _trajectory_step(trace: Trace, step: dict[str, Any]) -> None:
    if not trace.waits:
        text, command = first_text(step, "thought", "response"), text_at(step, "action").strip()
        trace.add(TraceStep("agent", text, calls=[ToolCall("bash", values.json_text({"command": command}))]))
    trace.add(TraceStep("user", results=[StepResult("", text_at(step, "observation"))]))
