"""Sessions of Claude Code (``~/.claude/projects/PATH/SESSION.jsonl``, files of sub-agents) and of the Codex CLI (``~/.codex/sessions``).

Claude Code spreads one answer over lines with one ``message.id``; results stand in later user records; the order is that of the
file, never of the times. A sub-agent is a trace of its own: of its own file, of side-chain records, or of progress records that
repeat its messages. Of Codex only response items become steps: events repeat them. Without an envelope (2025) the record is the item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from composer_replication.traces.json_values import at, items_at, text_at, text_of, typed
from composer_replication.traces.readers.messages import ROLES, add_message, content_parts, is_item
from composer_replication.traces.trace_records import (
    Dropped,
    Ledger,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
)

_INTERRUPTED = "[Request interrupted by user"
_DENIED = ("The user doesn't want to proceed", "The user doesn't want to take this action")
_FLAGS = {"isMeta": "injected", "isCompactSummary": "compacted", "isApiErrorMessage": "synthetic"}
_KNOWN = {
    "user", "assistant", "file-history-snapshot", "queue-operation", "summary", "attachment", "system", "progress",
}  # fmt: skip


def matches_claude_code(head: Sequence[Any]) -> str:
    """The version that the first record with one names."""
    own_key = {"file-history-snapshot": "type", "summary": "leafUuid"}
    is_ours = any(
        (at(row, "type") in _KNOWN and {"uuid", "sessionId"} <= row.keys())
        or own_key.get(text_at(row, "type")) in row
        for row in head
    )
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
        self._step_of: dict[str, tuple[str, int]] = {}
        self._call_of_agent: dict[str, str] = {}

    def take(self, record: dict[str, Any]) -> str | None:
        kind, uuid, data = text_at(record, "type"), text_at(record, "uuid"), record.get("data")
        known = self._step_of.get(text_at(record, "parentUuid"))
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
            raise Dropped(f"{kind} record" if kind in _KNOWN else f"a record of the kind {kind!r:.40}")
        return None

    def _message(self, record: dict[str, Any], agent: str) -> None:
        uuid, message, source = text_at(record, "uuid"), record["message"], ROLES[record["type"]]
        key = f"{agent}/{uuid}"
        if uuid and key in self._step_of:
            raise Dropped("a record that the file repeats")
        if "content" not in message:
            raise Dropped("a message without content")
        builder = self.builders.get(agent) or self._begun(record, agent)
        parts = list(content_parts(message["content"]))
        known = self._step_of.get(text_at(record, "parentUuid"))
        parent = known[1] if known is not None and known[0] == agent else builder.last
        flags = {flag for key, flag in _FLAGS.items() if record.get(key) is True}
        if message.get("model") == "<synthetic>":
            flags.add("synthetic")
        if source == "user" and any(isinstance(p, str) and p.startswith(_INTERRUPTED) for p in parts):
            flags.add("injected")
            builder.last_answer.flags.add("interrupted")
        answer_id, model = text_at(message, "id") or uuid, message.get("model")
        place = builder.add(source, parts, *flags, key=answer_id, parent=parent, model=model)
        is_denied = any(isinstance(part, StepResult) and part.text.startswith(_DENIED) for part in parts)
        if builder.answered is not None and (is_denied or record.get("toolDenialKind")):
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


_ENVELOPES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted", "world_state"}
_REPEATS = {"event_msg": "an event that repeats an item", "world_state": "state of the world"}


def matches_codex(head: Sequence[Any]) -> str:
    """The version of the CLI, ``legacy`` for rollouts without an envelope."""
    rows = [row for row in head if at(row, "type") in _ENVELOPES and isinstance(at(row, "payload"), dict)]
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
