"""What coding agents write themselves: Claude Code, Codex, OpenHands (from version 1 on), SWE-agent and mini-swe-agent.

Claude Code (``~/.claude/projects/PATH/SESSION.jsonl``, files of sub-agents) spreads one answer over lines with one
``message.id``; results stand in later user records; the order is that of the file, never of the times. A sub-agent is a trace of
its own: of its own file, of side-chain records, or of progress records that repeat its messages. Of Codex
(``~/.codex/sessions``) only response items become steps: events repeat them. Without an envelope (2025) the record is the item.

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
from composer_replication.traces.readers.messages import (
    ROLES,
    add_message,
    content_parts,
    function_tools,
    is_item,
    parts_of,
)
from composer_replication.traces.trace_records import (
    Dropped,
    Ledger,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
)

# ------------------------------------------------------------------------------ Claude Code

_INTERRUPTED = "[Request interrupted by user"
_DENIED = ("The user doesn't want to proceed", "The user doesn't want to take this action")
_FLAGS = {"isMeta": "injected", "isCompactSummary": "compacted", "isApiErrorMessage": "synthetic"}
_RECORDS = {
    "user", "assistant", "file-history-snapshot", "queue-operation", "summary", "attachment", "system", "progress",
}  # fmt: skip


def matches_claude_code(head: Sequence[Any]) -> str:
    """The version that the first record with one names."""
    own_keys = {"file-history-snapshot": {"type"}, "summary": {"leafUuid"}}
    kinds = ((row, text_at(row, "type")) for row in head)
    known = ((row, kind) for row, kind in kinds if kind in _RECORDS)
    is_ours = any(own_keys.get(kind, {"uuid", "sessionId"}) <= row.keys() for row, kind in known)
    versions = (text_at(row, "version") for row in head)
    return next(filter(None, versions), "unknown") if is_ours else ""


def read_claude_code(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """The session and each of its sub-agents."""
    session = _Session(name)
    for record in records:
        ledger.put(session.take, record)
    yield from (builder.trace for builder in session.builders.values() if builder.trace.steps)


class _Session:
    """``builders`` has one conversation for the session (key ""), and one for each sub-agent by its id."""

    def __init__(self, name: str) -> None:
        self.builders: dict[str, TraceBuilder] = {}
        self._name = name
        self._step_of: dict[Any, tuple[str, int]] = {}
        self._call_of_agent: dict[str, str] = {}

    def take(self, record: dict[str, Any]) -> str | None:
        kind, uuid, data = record.get("type"), record.get("uuid"), at(record, "data")
        known = self._step_of.get(record.get("parentUuid"))
        if known is not None and uuid:  # the chain of parents runs through records that are no messages
            self._step_of.setdefault(uuid, known)
        if kind in ("assistant", "user"):
            is_inner = record.get("isSidechain") is True
            self._message(record, (text_at(record, "agentId") or "sidechain") if is_inner else "")
        elif at(data, "type") == "agent_progress" and at(data, "message", "type") in ("user", "assistant"):
            self._call_of_agent.setdefault(data["agentId"], text_at(record, "parentToolUseID"))
            self._message({**record, **data["message"], "parentUuid": None}, data["agentId"])
        elif kind == "system" and record.get("subtype") == "compact_boundary":
            self._step_of[uuid] = ("", -1)
            return "kept: border of a compaction"
        else:
            raise Dropped(f"{kind} record" if kind in _RECORDS else f"a record of the kind {kind!r:.40}")
        return None

    def _message(self, record: dict[str, Any], agent: str) -> None:
        uuid, message, source = record.get("uuid"), record["message"], ROLES[record["type"]]
        key = f"{agent}/{uuid}"
        if uuid and key in self._step_of:
            raise Dropped("a record that the file repeats")
        if "content" not in message:
            raise Dropped("a message without content")
        builder = self.builders.get(agent) or self._begun(record, agent)
        parts = list(content_parts(message["content"]))
        known = self._step_of.get(record.get("parentUuid"))
        parent = known[1] if known is not None and known[0] == agent else builder.last
        flags = {flag for key, flag in _FLAGS.items() if record.get(key) is True}
        if message.get("model") == "<synthetic>":
            flags.add("synthetic")
        if source == "user" and any(isinstance(p, str) and p.startswith(_INTERRUPTED) for p in parts):
            flags.add("injected")
            builder.last_answer.flags.add("interrupted")
        answer_id, model = message.get("id") or uuid or "", message.get("model")
        place = builder.add(source, parts, *flags, key=answer_id, parent=parent, model=model)
        if source == "user" and builder.answered is not None:
            is_denied = any(isinstance(p, StepResult) and p.text.startswith(_DENIED) for p in parts)
            if is_denied or record.get("toolDenialKind"):
                builder.answered.flags.add("denied")
        self._step_of[uuid] = self._step_of[key] = (agent, place)

    def _begun(self, record: dict[str, Any], agent: str) -> TraceBuilder:
        """A new conversation."""
        session = text_at(record, "sessionId") or self._name
        trace = Trace(f"{session}/{agent}" if agent else session, "claude-code", agent="claude-code")
        trace.version = text_at(record, "version")
        trace.state = RepositoryState(folder=text_at(record, "cwd"))
        trace.parent = (session, self._call_of_agent.get(agent, "")) if agent else None
        return self.builders.setdefault(agent, TraceBuilder(trace))


# ------------------------------------------------------------------------------ Codex

_ENVELOPES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted", "world_state"}
_REPEATS = {"event_msg": "an event that repeats an item", "world_state": "state of the world"}


def matches_codex(head: Sequence[Any]) -> str:
    """The version of the CLI, ``legacy`` for rollouts without an envelope."""
    rows = [
        row for row in head if text_at(row, "type") in _ENVELOPES and isinstance(at(row, "payload"), dict)
    ]
    is_old = any(at(r, "type") in ("function_call", "function_result") and "created_at" in r for r in head)
    versions = (text_at(row, "payload", "cli_version") for row in rows)
    return next(filter(None, versions), "legacy" if is_old else "unknown" if rows else "")


def read_codex(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """The one conversation of a rollout."""
    rollout = _Rollout(name)
    for record in records:
        ledger.put(rollout.take, record)
    rollout.builder.trace.prompt_origin = "rebuilt"  # the schemas of the tools are not in the file
    yield rollout.builder.trace


class _Rollout:
    def __init__(self, name: str) -> None:
        self.builder = TraceBuilder(Trace(name, "codex", agent="codex"))
        self._has_meta = False
        self._first_own = 0
        self._model = ""

    def take(self, record: dict[str, Any]) -> str | None:
        kind, payload = record.get("type"), record.get("payload")
        event = at(payload, "type") if kind == "event_msg" else None
        if kind == "session_meta":
            self._session(record["payload"])
            return "kept: metadata of the session"
        if kind == "turn_context":
            self._model = text_at(payload, "model") or self._model
            return "kept: context of a turn"
        if event == "turn_aborted":
            self.builder.last_answer.flags.add("interrupted")
            return "kept: interruption"
        if kind == "token_usage_record" or event == "token_count":
            self.builder.close()
            raise Dropped("token counts")
        if kind == "compacted":
            self._compacted(record["payload"])
        elif kind == "function_result":
            self._item({"type": "function_call_output", "output": record.get("result")}, record)
        elif kind == "response_item" or (is_item(record) and "payload" not in record):
            self._item(payload if isinstance(payload, dict) else record, record)
        else:
            raise Dropped(_REPEATS.get(str(kind), f"a record of the kind {kind!r:.40}"))
        return None

    def _session(self, payload: dict[str, Any]) -> None:
        if self._has_meta:
            return
        self._has_meta = True
        trace = self.builder.trace
        trace.trace_id = text_at(payload, "id") or trace.trace_id
        trace.version = text_at(payload, "cli_version")
        url, commit = (text_at(payload, "git", key) for key in ("repository_url", "commit_hash"))
        trace.state = RepositoryState("", url, commit, text_at(payload, "cwd"))
        parent = text_at(payload, "source", "subagent", "thread_spawn", "parent_thread_id")
        trace.parent = (parent, "") if parent else None
        self._first_own = typed(int, payload.get("subagent_history_start_ordinal")) or 0
        if text := text_at(payload, "base_instructions", "text") or text_at(payload, "instructions"):
            self.builder.add("system", [text])

    def _item(self, item: dict[str, Any], record: dict[str, Any]) -> None:
        flags = ["copied"] if (typed(int, record.get("ordinal")) or 0) < self._first_own else []
        item = {"type": "message", **item}  # without "type" a message would begin an answer of its own
        add_message(self.builder, item, *flags, model=self._model or record.get("model"))

    def _compacted(self, payload: dict[str, Any]) -> None:
        """The conversation goes on from what the record gives in place of its history."""
        steps, first = self.builder.trace.steps, len(self.builder.trace.steps)
        for item in filter(is_item, items_at(payload, "replacement_history")):
            add_message(self.builder, {"type": "message", **item}, "compacted", "copied")
        if first == len(steps):
            self.builder.add("user", [text_of(payload.get("message"))], "compacted", "copied")
        steps[first].parent = -1
        self.builder.close()


# ------------------------------------------------------------------------------ OpenHands

_EVENTS = {
    "SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent", "UserRejectObservation", "AgentErrorEvent",
    "Condensation", "ConversationStateUpdateEvent",
}  # fmt: skip


def matches_openhands(head: Sequence[Any]) -> str:
    """``1`` for typed events, ``evaluation`` for rows with a history of them."""
    if any(text_at(event, "kind") in _EVENTS for event in items_at(head[0], "history")[:20]):
        return "evaluation"
    return "1" if any(text_at(event, "kind") in _EVENTS for event in head) else ""


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
        thoughts = {name: event.get(name) for name in ("reasoning_content", "thinking_blocks")}
        answer = {**thoughts, "content": event.get("thought")}
        given = at(event, "tool_call", "arguments")
        if given is None:
            given = {name: value for name, value in (event.get("action") or {}).items() if name != "kind"}
        tool = text_at(event, "tool_call", "name") or text_at(event, "tool_name")
        parts = [] if key in builder.answers else [*parts_of({"role": "assistant", **answer})]
        builder.add("agent", [*parts, ToolCall(tool, json_text(given), call_id)], key=key)
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


# ------------------------------------------------------------------------------ SWE-agent

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
    _add_command(builder, text_at(step, "action").strip())
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
