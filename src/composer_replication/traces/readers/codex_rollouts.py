"""Rollouts of the Codex CLI: ``~/.codex/sessions/Y/M/D/rollout-*.jsonl``.

Only response items become steps: events repeat them. Without an envelope (2025) the record is the item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from composer_replication.traces.json_values import at, integer, items, string, text_of
from composer_replication.traces.readers.messages import add_message, is_item
from composer_replication.traces.trace_records import Dropped, Ledger, RepositoryState, Trace, TraceBuilder

_ENVELOPES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted", "world_state"}


def matches_codex(head: Sequence[Any]) -> str:
    """The version of the CLI, ``legacy`` for rollouts without an envelope."""
    rows = [row for row in head if at(row, "type") in _ENVELOPES and isinstance(at(row, "payload"), dict)]
    for row in rows:
        if row["type"] == "session_meta":
            return string(row["payload"].get("cli_version")) or "unknown"
    is_old = any(
        at(row, "type") in ("function_call", "function_result") and "created_at" in row for row in head
    )
    return "legacy" if is_old else ("unknown" if rows else "")


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
        # without "type" a message would begin an answer of its own
        add_message(
            self.builder, {"type": "message", **item}, *flags, model=self._model or record.get("model")
        )

    def _compacted(self, payload: dict[str, Any]) -> None:
        """The conversation goes on from what the record gives in place of its history."""
        steps, first = self.builder.trace.steps, len(self.builder.trace.steps)
        for item in filter(is_item, items(payload.get("replacement_history"))):
            add_message(self.builder, {"type": "message", **item}, "compacted", "copied")
        if first == len(steps):
            self.builder.add("user", [text_of(payload.get("message"))], "compacted", "copied")
        steps[first].parent = -1
        self.builder.close()
