"""The Agent Trajectory Interchange Format (ATIF) of the Harbor project: read leniently from 1.0 to 1.8, written as 1.7.

A line of ours holds in ``extra.composer_replication_trace`` what the format has no field for, so that it is read back as it was.
Episodes that our own agent loop wrote are ATIF too, and know their task and score.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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
from composer_replication.traces.readers.messages import function_tools
from composer_replication.traces.trace_records import (
    FLAGS,
    Dropped,
    Ledger,
    Part,
    RepositoryState,
    StepResult,
    Thought,
    Trace,
    TraceBuilder,
    TraceStep,
)

_TRACE = "composer_replication_trace"
_EPISODE = "composer_replication"
_RAW_CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_calls?_|<｜tool▁call")
"""Where the markup of a call begins in an answer of our own loop, which keeps what was sampled as it is."""
_END_TOKENS = re.compile(r"\s*<\|(?:im_end|eot_id|eom_id|endoftext|end)\|>\s*$")


def matches_atif(head: Sequence[Any]) -> str:
    """The version that the document names."""
    version = string(at(head[0], "schema_version"))
    return version.removeprefix("ATIF-v") if isinstance(at(head[0], "steps"), list) else ""


def read_atif(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document or line, and of each sub-agent that is embedded in it."""
    for number, document in enumerate(records):
        yield from _traces(document, ledger, f"{name}#{number}", None)


def trace_row(trace: Trace) -> dict[str, Any]:
    """A trace as an ATIF object, valid for the models of Harbor 0.26."""
    agent: dict[str, Any] = {"name": trace.agent or trace.format, "version": trace.version or "unknown"}
    known = {"model_name": trace.model, "tool_definitions": trace.tools}
    agent |= {key: value for key, value in known.items() if value}
    ours = {
        "format": trace.format,
        "format_version": trace.version,
        "prompt_origin": trace.prompt_origin,
        "state": asdict(trace.state),
        "parent": trace.parent,
        "passed": trace.passed,
    }
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": trace.trace_id,
        "trajectory_id": trace.trace_id,
        "agent": agent,
        "steps": [_step_row(step, idx) for idx, step in enumerate(trace.steps)],
        "extra": {_TRACE: ours},
    }


def trace_of(row: dict[str, Any]) -> Trace:
    """The trace that a line of ours holds."""
    return next(_traces(row, Ledger(), string(row.get("trajectory_id")), None))


def _step_row(step: TraceStep, idx: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step_id": idx + 1, "source": step.source, "message": step.text}
    extra: dict[str, Any] = {
        "parent": step.parent + 1 if step.parent != idx - 1 else None,
        "flags": sorted(step.flags),
        "sealed": step.sealed,
    }
    if step.source == "agent":
        results = [_result_row(result) for result in step.results]
        fields: dict[str, Any] = {
            "model_name": step.model,
            "reasoning_content": step.reasoning,
            "tool_calls": [_call_row(call) for call in step.calls],
            "observation": {"results": results} if results else None,
        }
        row |= {key: value for key, value in fields.items() if value}
    if extra := {key: value for key, value in extra.items() if value or value == 0}:
        row["extra"] = extra
    if "copied" in step.flags:
        row["is_copied_context"] = True
    return row


def _call_row(call: ToolCall) -> dict[str, Any]:
    arguments = parsed(call.arguments)
    row = {"tool_call_id": call.call_id, "function_name": call.name, "arguments": arguments}
    if not isinstance(arguments, dict):
        row |= {"arguments": {}, "extra": {"arguments_text": call.arguments}}
    return row


def _result_row(result: StepResult) -> dict[str, Any]:
    row = {"content": result.text} | ({"source_call_id": result.call_id} if result.call_id else {})
    both = {"is_error": result.is_error, "exit_code": result.exit_code}
    extra = {key: value for key, value in both.items() if value is not None}
    return row | ({"extra": extra} if extra else {})


def _traces(document: Any, ledger: Ledger, name: str, parent: tuple[str, str] | None) -> Iterator[Trace]:
    ledger.put(lambda _: "kept: the document", document)
    ours, episode = at(document, "extra", _TRACE), at(document, "extra", _EPISODE)
    trace_id = string(at(document, "trajectory_id") or at(document, "session_id")) or name
    trace = Trace(trace_id, string(at(ours, "format")) or "atif", agent=string(at(document, "agent", "name")))
    trace.version = string(at(ours, "format_version") if ours else at(document, "schema_version"))
    trace.tools = function_tools(at(document, "agent", "tool_definitions"))
    trace.state = RepositoryState(*(string(at(ours, "state", key)) for key in RepositoryState.__slots__))
    builder = TraceBuilder(trace)
    ledger.put_inner(partial(_add_step, builder, has_raw_calls=bool(episode)), items(at(document, "steps")))
    trace.model = string(at(document, "agent", "model_name")) or trace.model
    has_prompt = bool(trace.tools) and trace.prompt_origin == "recorded"
    is_recorded = at(ours, "prompt_origin") == "recorded" if ours else has_prompt or bool(episode)
    trace.prompt_origin = "recorded" if is_recorded else "rebuilt"
    own_parent = items(at(ours, "parent"))
    trace.parent = (string(own_parent[0]), string(own_parent[1])) if len(own_parent) == 2 else parent
    trace.passed = flag(at(ours, "passed"))
    if episode:
        trace.state = RepositoryState(string(at(episode, "task_id")))
        outcomes = at(episode, "score", "outcomes")
        if isinstance(outcomes, dict) and outcomes:
            trace.passed = set(outcomes.values()) == {"passed"} and not at(episode, "score", "error")
    yield trace
    for number, inner in enumerate(items(at(document, "subagent_trajectories"))):
        ledger.num_records += 1
        yield from _traces(inner, ledger, f"{name}/{number}", (trace_id, ""))


def _add_step(builder: TraceBuilder, row: dict[str, Any], *, has_raw_calls: bool) -> None:
    source, extra = row.get("source"), row.get("extra") or {}
    if source not in ("system", "user", "agent"):
        raise Dropped("a step without a source")
    text, parts = text_of(row.get("message")), list(_answer_parts(row, extra)) if source == "agent" else []
    if has_raw_calls:
        is_call = any(isinstance(part, ToolCall) for part in parts)
        text = _END_TOKENS.sub("", _RAW_CALL.split(text)[0].rstrip() if is_call else text)
    flags = [each for each in items(extra.get("flags")) if each in FLAGS]
    flags += ["copied"] if row.get("is_copied_context") is True else []
    parent = integer(extra.get("parent"))
    builder.add(
        source,
        filter(None, [text, *parts]),
        *flags,
        parent=parent - 1 if parent is not None and 0 <= parent <= builder.last + 1 else None,
        model=row.get("model_name"),
    )


def _answer_parts(row: dict[str, Any], extra: dict[str, Any]) -> Iterator[Part]:
    if thought := string(row.get("reasoning_content")):
        yield Thought(thought)
    yield from (Thought("", string(each)) for each in items(extra.get("sealed")))
    for call in items(row.get("tool_calls")):
        name, call_id = string(at(call, "function_name")), string(at(call, "tool_call_id"))
        written = at(call, "extra", "arguments_text")
        yield ToolCall(name, arguments_text(at(call, "arguments") if written is None else written), call_id)
    for result in items(at(row, "observation", "results")):
        known = at(result, "extra")
        yield StepResult(
            string(at(result, "source_call_id")),
            text_of(at(result, "content")),
            flag(at(known, "is_error")),
            integer(at(known, "exit_code")),
        )
