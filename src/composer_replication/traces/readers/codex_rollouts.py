"""Rollouts of the Codex CLI: ``~/.codex/sessions/Y/M/D/rollout-*.jsonl``.

Only response items become steps: events repeat them. Without an envelope (2025) the record is the item.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_replication.traces.readers.chat_messages import usage_of
from composer_replication.traces.readers.response_items import add_item, is_item
from composer_replication.traces.trace_records import (
    Ledger,
    RepositoryState,
    Trace,
    TraceBuilder,
    integer,
    items,
    mapping,
    string,
    text_of,
)

_ENVELOPES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted", "world_state"}


def matches_codex(head: Sequence[Any]) -> str:
    """The version of the CLI, ``legacy`` for rollouts without an envelope."""
    rows = [mapping(row) for row in head]
    enveloped = [
        row
        for row in rows
        if string(row.get("type")) in _ENVELOPES and isinstance(row.get("payload"), Mapping)
    ]
    for row in enveloped:
        if row["type"] == "session_meta":
            return string(row["payload"].get("cli_version")) or "unknown"
    is_old = any(
        row.get("type") in ("function_call", "function_result") and "created_at" in row for row in rows
    )
    return "legacy" if is_old else ("unknown" if enveloped else "")


def read_codex(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """The one conversation of a rollout."""
    builder = TraceBuilder(Trace(name, "codex", agent="codex"))
    reader = _Rollout(builder, ledger)
    for record in map(mapping, records):
        reader.take(record)
    yield builder.trace


class _Rollout:
    def __init__(self, builder: TraceBuilder, ledger: Ledger) -> None:
        self._builder, self._ledger = builder, ledger
        self._num_meta = self._first_own = 0
        self._model = ""

    def take(self, record: Mapping[str, Any]) -> None:
        kind, payload = string(record.get("type")), record.get("payload")
        if kind not in _ENVELOPES or not isinstance(payload, Mapping):
            self._without_envelope(record)
        elif kind == "session_meta":
            self._session(payload)
        elif kind == "turn_context":
            self._model = string(payload.get("model")) or self._model
            self._ledger.kept("context of a turn")
        elif kind == "response_item":
            self._item(payload, record)
        elif kind == "compacted":
            self._compacted(payload)
        elif kind == "event_msg":
            self._event(payload)
        else:
            self._ledger.dropped("state of the world")

    def _without_envelope(self, record: Mapping[str, Any]) -> None:
        kind = record.get("type")
        if kind == "token_usage_record":
            self._usage(mapping(mapping(record.get("payload")).get("usage")))
        elif kind == "function_result":
            self._item({"type": "function_call_output", "output": record.get("result")}, record)
        elif kind == "function_call" and (function := mapping(record.get("function"))):
            self._item({**record, "name": function.get("name")}, record)
        elif "payload" not in record and is_item(record):
            self._item(record, record)
        else:
            self._ledger.dropped(f"a record of the kind {kind!r:.40}")

    def _session(self, payload: Mapping[str, Any]) -> None:
        self._ledger.kept("metadata of the session")
        self._num_meta += 1
        if self._num_meta > 1:
            return
        trace, git = self._builder.trace, mapping(payload.get("git"))
        trace.trace_id = string(payload.get("id")) or trace.trace_id
        trace.version = string(payload.get("cli_version"))
        trace.state = RepositoryState(
            repository=string(git.get("repository_url")),
            commit=string(git.get("commit_hash")),
            folder=string(payload.get("cwd")),
        )
        spawn = mapping(mapping(mapping(payload.get("source")).get("subagent")).get("thread_spawn"))
        if parent := string(spawn.get("parent_thread_id")):
            trace.parent = (parent, "")
        self._first_own = integer(payload.get("subagent_history_start_ordinal")) or 0
        instructions = mapping(payload.get("base_instructions")).get("text") or payload.get("instructions")
        if string(instructions):
            self._builder.message("system", string(instructions))
        trace.prompt_origin = "rebuilt"  # the schemas of the tools are not in the file

    def _item(self, item: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        stamp = string(record.get("timestamp")) or string(record.get("created_at"))
        why = add_item(self._builder, item, stamp)
        if why:
            self._ledger.dropped(why)
            return
        self._ledger.mapped()
        self._builder.trace.prompt_origin = "rebuilt"
        step = self._builder.open
        if step is not None:
            step.model = step.model or self._model or string(record.get("model"))
            self._builder.trace.model = self._builder.trace.model or step.model
        if (integer(record.get("ordinal")) or 0) < self._first_own and self._builder.trace.steps:
            self._builder.trace.steps[-1].flags.add("copied")

    def _compacted(self, payload: Mapping[str, Any]) -> None:
        """The conversation goes on from what the record gives in place of its history."""
        self._ledger.mapped()
        history = [item for item in items(payload.get("replacement_history")) if is_item(item)]
        first = len(self._builder.trace.steps)
        for item in history:
            add_item(self._builder, item)
        if not history:
            self._builder.message("user", text_of(payload.get("message")))
        for step in self._builder.trace.steps[first:]:
            step.flags |= {"compacted", "copied"}
        if first < len(self._builder.trace.steps):
            self._builder.trace.steps[first].parent = -1
        self._builder.open = None

    def _event(self, payload: Mapping[str, Any]) -> None:
        kind = payload.get("type")
        if kind == "token_count":
            self._usage(mapping(mapping(payload.get("info")).get("last_token_usage")))
        elif kind == "turn_aborted":
            self._ledger.kept("interruption")
            self._last_answer_flags().add("interrupted")
        else:
            self._ledger.dropped("an event that repeats an item")

    def _usage(self, usage: Mapping[str, Any]) -> None:
        self._ledger.kept("token counts")
        self._builder.open = None
        for step in reversed(self._builder.trace.steps):
            if step.source == "agent":
                step.usage = usage_of(usage)
                break

    def _last_answer_flags(self) -> set[str]:
        found = next((s for s in reversed(self._builder.trace.steps) if s.source == "agent"), None)
        return set() if found is None else found.flags
