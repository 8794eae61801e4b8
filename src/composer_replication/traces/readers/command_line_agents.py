"""Sessions of Claude Code (``~/.claude/projects/PATH/SESSION.jsonl``, files of sub-agents) and of the Codex CLI (``~/.codex/sessions``).

Claude Code spreads one answer over lines with one ``message.id``; results stand in later user records; the order is that of the
file, never of the times. A sub-agent is a trace of its own: of its own file, of side-chain records, or of progress records that
repeat its messages. Of Codex only response items become steps: events repeat them. Without an envelope (2025) the record is the item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from composer_replication.traces.json_values import at, integer, items, string, text_of
from composer_replication.traces.readers.messages import ROLES, add_message, is_item, parts_of
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
    is_ours = any(
        (at(row, "type") in _KNOWN and "uuid" in row and "sessionId" in row)
        or at(row, "type") == "file-history-snapshot"
        or (at(row, "type") == "summary" and "leafUuid" in row)
        for row in head
    )
    versions = (string(at(row, "version")) for row in head)
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
        kind, uuid = string(record.get("type")), string(record.get("uuid"))
        data, known = at(record, "data"), self._step_of.get(string(record.get("parentUuid")))
        if known is not None and uuid:  # the chain of parents runs through records that are no messages
            self._step_of.setdefault(uuid, known)
        if kind in ("assistant", "user"):
            is_inner = record.get("isSidechain") is True
            self._message(record, (string(record.get("agentId")) or "sidechain") if is_inner else "")
        elif at(data, "type") == "agent_progress" and at(data, "message", "type") in ("user", "assistant"):
            agent = data["agentId"]
            self._call_of_agent.setdefault(agent, string(record.get("parentToolUseID")))
            self._message({**record, **data["message"], "parentUuid": None}, agent)
        elif kind == "system" and record.get("subtype") == "compact_boundary":
            self._step_of[uuid] = ("", -1)
            return "kept: border of a compaction"
        else:
            raise Dropped(f"{kind} record" if kind in _KNOWN else f"a record of the kind {kind!r:.40}")
        return None

    def _message(self, record: dict[str, Any], agent: str) -> None:
        uuid, message = string(record.get("uuid")), record["message"]
        key = f"{agent}/{uuid}"
        if uuid and key in self._step_of:
            raise Dropped("a record that the file repeats")
        if "content" not in message:
            raise Dropped("a message without content")
        if agent not in self.builders:
            session = string(record.get("sessionId")) or self._name
            trace = Trace(f"{session}/{agent}" if agent else session, "claude-code", agent="claude-code")
            trace.version = string(record.get("version"))
            trace.state = RepositoryState(folder=string(record.get("cwd")))
            trace.parent = (session, self._call_of_agent.get(agent, "")) if agent else None
            self.builders[agent] = TraceBuilder(trace)
        builder, model = self.builders[agent], message.get("model")
        answer_id = string(message.get("id")) or uuid
        parts = list(parts_of({"role": record["type"], "content": message["content"]}))
        known = self._step_of.get(string(record.get("parentUuid")))
        parent = known[1] if known is not None and known[0] == agent else builder.last
        flags = {flag for key, flag in _FLAGS.items() if record.get(key) is True}
        if model == "<synthetic>":
            flags.add("synthetic")
        says_stopped = any(isinstance(part, str) and part.startswith(_INTERRUPTED) for part in parts)
        if record["type"] == "user" and says_stopped:
            flags.add("injected")
            builder.last_answer().flags.add("interrupted")
        place = builder.add(ROLES[record["type"]], parts, *flags, key=answer_id, parent=parent, model=model)
        is_denied = any(isinstance(part, StepResult) and part.text.startswith(_DENIED) for part in parts)
        if builder.answered is not None and (is_denied or record.get("toolDenialKind")):
            builder.answered.flags.add("denied")
        self._step_of[uuid] = self._step_of[key] = (agent, place)


_ENVELOPES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted", "world_state"}


def matches_codex(head: Sequence[Any]) -> str:
    """The version of the CLI, ``legacy`` for rollouts without an envelope."""
    rows = [row for row in head if at(row, "type") in _ENVELOPES and isinstance(at(row, "payload"), dict)]
    versions = (string(at(row, "payload", "cli_version")) for row in rows)
    is_old = any(
        at(row, "type") in ("function_call", "function_result") and "created_at" in row for row in head
    )
    other = "legacy" if is_old else "unknown" if rows else ""
    return next(filter(None, versions), other)


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
            return self._session(record["payload"])
        if kind == "turn_context":
            self._model = string(at(payload, "model")) or self._model
            return "kept: context of a turn"
        if kind == "token_usage_record" or event == "token_count":
            self.builder.close()
            raise Dropped("token counts")
        if event == "turn_aborted":
            self.builder.last_answer().flags.add("interrupted")
            return "kept: interruption"
        if kind == "compacted":
            self._compacted(record["payload"])
        elif kind == "function_result":
            self._item({"type": "function_call_output", "output": record.get("result")}, record)
        elif kind == "response_item" or (is_item(record) and "payload" not in record):
            self._item(payload if isinstance(payload, dict) else record, record)
        else:
            known = {"event_msg": "an event that repeats an item", "world_state": "state of the world"}
            raise Dropped(known.get(str(kind), f"a record of the kind {kind!r:.40}"))
        return None

    def _session(self, payload: dict[str, Any]) -> str:
        if not self._has_meta:
            self._has_meta = True
            trace = self.builder.trace
            trace.trace_id = string(payload.get("id")) or trace.trace_id
            trace.version = string(payload.get("cli_version"))
            url, commit = (string(at(payload, "git", key)) for key in ("repository_url", "commit_hash"))
            trace.state = RepositoryState("", url, commit, string(payload.get("cwd")))
            parent = string(at(payload, "source", "subagent", "thread_spawn", "parent_thread_id"))
            trace.parent = (parent, "") if parent else None
            self._first_own = integer(payload.get("subagent_history_start_ordinal")) or 0
            text = string(at(payload, "base_instructions", "text") or payload.get("instructions"))
            if text:
                self.builder.add("system", [text])
        return "kept: metadata of the session"

    def _item(self, item: dict[str, Any], record: dict[str, Any]) -> None:
        is_copied = (integer(record.get("ordinal")) or 0) < self._first_own
        flags = ("copied",) if is_copied else ()
        item = {"type": "message", **item}  # without "type" a message would begin an answer of its own
        add_message(self.builder, item, *flags, model=self._model or record.get("model"))

    def _compacted(self, payload: dict[str, Any]) -> None:
        """The conversation goes on from what the record gives in place of its history."""
        steps, first = self.builder.trace.steps, len(self.builder.trace.steps)
        for item in filter(is_item, items(payload.get("replacement_history"))):
            add_message(self.builder, {"type": "message", **item}, "compacted", "copied")
        if first == len(steps):
            self.builder.add("user", [text_of(payload.get("message"))], "compacted", "copied")
        steps[first].parent = -1
        self.builder.close()
