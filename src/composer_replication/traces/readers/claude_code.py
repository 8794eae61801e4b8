"""Sessions of Claude Code: ``~/.claude/projects/PATH/SESSION.jsonl`` and the files of its sub-agents.

One answer is spread over lines with one ``message.id``; results stand in later user records; the order is that of the file,
never of the times. A sub-agent is a trace of its own: of its own file, of side-chain records, or of progress records that
repeat its messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.readers.chat_messages import usage_of
from composer_replication.traces.trace_records import (
    Ledger,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
    TraceStep,
    arguments_text,
    items,
    mapping,
    string,
    text_of,
)

_INTERRUPTED = "[Request interrupted by user"
_DENIED = ("The user doesn't want to proceed", "The user doesn't want to take this action")
_CONTROL = {"file-history-snapshot", "queue-operation", "summary", "attachment", "system", "progress"}
_KNOWN = _CONTROL | {"user", "assistant"}


def matches_claude_code(head: Sequence[Any]) -> str:
    """The version that the first record with one names."""
    rows = [mapping(row) for row in head]
    is_ours = any(
        (row.get("type") in _KNOWN and "uuid" in row and "sessionId" in row)
        or row.get("type") == "file-history-snapshot"
        or (row.get("type") == "summary" and "leafUuid" in row)
        for row in rows
    )
    return (
        next((string(row["version"]) for row in rows if string(row.get("version"))), "unknown")
        if is_ours
        else ""
    )


def read_claude_code(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """The session and each of its sub-agents."""
    session = _Session(ledger, name)
    for record in map(mapping, records):
        session.take(record)
    yield from (builder.trace for builder in session.builders.values() if builder.trace.steps)


class _Session:
    """``builders`` has one conversation for the session (key ""), and one for each sub-agent by its id."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self.builders: dict[str, TraceBuilder] = {}
        self._ledger, self._name = ledger, name
        self._step_of: dict[str, tuple[str, int]] = {}
        self._seen: set[str] = set()
        self._answers: dict[str, int] = {}
        self._call_of_agent: dict[str, str] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        kind = string(record.get("type"))
        if kind in ("assistant", "user"):
            self._message(record, self._agent_id(record))
        elif kind == "progress":
            self._progress(record)
        elif kind == "system" and record.get("subtype") == "compact_boundary":
            self._step_of[string(record.get("uuid"))] = ("", -1)
            self._ledger.kept("border of a compaction")
        elif kind == "system":
            self._pass_on(record)
            self._ledger.dropped("message of the program")
        elif kind in _CONTROL:
            self._pass_on(record)
            self._ledger.dropped(f"{kind} record")
        else:
            self._pass_on(record)
            self._ledger.dropped(f"a record of the kind {kind!r:.40}")

    def _agent_id(self, record: Mapping[str, Any]) -> str:
        return (string(record.get("agentId")) or "sidechain") if record.get("isSidechain") is True else ""

    def _progress(self, record: Mapping[str, Any]) -> None:
        data = mapping(record.get("data"))
        self._pass_on(record)
        inner = mapping(data.get("message"))
        agent_id = string(data.get("agentId"))
        if (
            data.get("type") != "agent_progress"
            or inner.get("type") not in ("user", "assistant")
            or not agent_id
        ):
            self._ledger.dropped("progress record")
            return
        self._call_of_agent.setdefault(agent_id, string(record.get("parentToolUseID")))
        self._message({**record, **inner, "parentUuid": None}, agent_id)

    def _pass_on(self, record: Mapping[str, Any]) -> None:
        """The chain of parents runs through records that are no messages."""
        known = self._step_of.get(string(record.get("parentUuid")))
        if known is not None and string(record.get("uuid")):
            self._step_of[string(record.get("uuid"))] = known

    def _message(self, record: Mapping[str, Any], agent_id: str) -> None:
        uuid = string(record.get("uuid"))
        if uuid and uuid in self._seen:
            self._ledger.dropped("a record that the file repeats")
            return
        self._seen.add(uuid)
        message = mapping(record.get("message"))
        if not message or "content" not in message:
            self._ledger.dropped("a message without content")
            return
        builder = self.builders.get(agent_id) or self._begin(record, agent_id)
        take = self._assistant if record["type"] == "assistant" else self._user
        place = take(builder, record, message, agent_id)
        if uuid:
            self._step_of[uuid] = (agent_id, place)

    def _begin(self, record: Mapping[str, Any], agent_id: str) -> TraceBuilder:
        session = string(record.get("sessionId")) or self._name
        trace = Trace(f"{session}/{agent_id}" if agent_id else session, "claude-code", agent="claude-code")
        trace.version = string(record.get("version"))
        trace.state = RepositoryState(folder=string(record.get("cwd")))
        if agent_id:
            trace.parent = (session, self._call_of_agent.get(agent_id, ""))
        self.builders[agent_id] = TraceBuilder(trace)
        return self.builders[agent_id]

    def _parent(self, builder: TraceBuilder, record: Mapping[str, Any], agent_id: str) -> int:
        """The step that a record follows: by its parent, else the last of its conversation."""
        parent = string(record.get("parentUuid"))
        known = self._step_of.get(parent)
        if known is not None and known[0] == agent_id:
            return known[1]
        return builder.last

    def _assistant(
        self, builder: TraceBuilder, record: Mapping[str, Any], message: Mapping[str, Any], agent_id: str
    ) -> int:
        answer_id = f"{agent_id}/{string(message.get('id')) or string(record.get('uuid'))}"
        place = self._answers.get(answer_id)
        if place is None:
            new = TraceStep(
                "agent", timestamp=string(record.get("timestamp")), model=string(message.get("model"))
            )
            place = self._answers[answer_id] = builder.add(new, self._parent(builder, record, agent_id))
        step = builder.trace.steps[place]
        if step.model == "<synthetic>" or record.get("isApiErrorMessage") is True:
            step.flags.add("synthetic")
        elif not builder.trace.model:
            builder.trace.model = step.model
        content = message["content"]
        for block in items(content) if isinstance(content, list) else [{"type": "text", "text": content}]:
            self._block(builder, step, mapping(block))
        step.usage = usage_of(message.get("usage")) or step.usage
        self._ledger.mapped()
        return place

    def _block(self, builder: TraceBuilder, step: TraceStep, block: Mapping[str, Any]) -> None:
        kind = block.get("type")
        if kind == "text":
            text = string(block.get("text"))
            step.text = f"{step.text}\n{text}" if step.text else text
        elif kind in ("thinking", "redacted_thinking"):
            thought = string(block.get("thinking"))
            step.reasoning = f"{step.reasoning}\n{thought}" if step.reasoning else thought
            if sealed := string(block.get("signature")) or string(block.get("data")):
                step.sealed.append(sealed)
        elif kind in ("tool_use", "server_tool_use") and string(block.get("name")):
            call = ToolCall(
                string(block["name"]), arguments_text(block.get("input")), string(block.get("id"))
            )
            builder.call(step, call)

    def _user(
        self, builder: TraceBuilder, record: Mapping[str, Any], message: Mapping[str, Any], agent_id: str
    ) -> int:
        content = message["content"]
        blocks = [mapping(block) for block in items(content)]
        results = [block for block in blocks if block.get("type") == "tool_result"]
        why = ""
        for block in results:
            why = self._result(builder, record, block) or why
        text = text_of([block for block in blocks if block.get("type") != "tool_result"]) or string(content)
        place = self._parent(builder, record, agent_id)
        if text or not results:
            flags = self._flags(builder, record, text)
            place = builder.add(TraceStep("user", text, timestamp=string(record.get("timestamp"))), place)
            builder.trace.steps[place].flags = flags
        if why and not text:
            self._ledger.dropped(why)
        else:
            self._ledger.mapped()
        return place

    def _result(self, builder: TraceBuilder, record: Mapping[str, Any], block: Mapping[str, Any]) -> str:
        text = text_of(block.get("content"))
        is_error = block.get("is_error")
        result = StepResult(
            string(block.get("tool_use_id")), text, is_error if isinstance(is_error, bool) else False
        )
        result.is_truncated = text.startswith("<persisted-output>")
        why = "a result without its call" if not result.call_id else builder.result(result)
        if not why and (record.get("toolDenialKind") or text.startswith(_DENIED)):
            for step in reversed(builder.trace.steps):
                if any(each is result for each in step.results):
                    step.flags.add("denied")
                    break
        return why

    def _flags(self, builder: TraceBuilder, record: Mapping[str, Any], text: str) -> set[str]:
        flags = {"injected"} if record.get("isMeta") is True else set()
        if record.get("isCompactSummary") is True:
            flags.add("compacted")
        if text.startswith(_INTERRUPTED):
            flags.add("injected")
            for step in reversed(builder.trace.steps):
                if step.source == "agent":
                    step.flags.add("interrupted")
                    break
        return flags
