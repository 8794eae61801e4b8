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
from composer_replication.traces.json_values import at, items_at, json_text, parsed, text_at, text_of, typed
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
    version = text_at(head[0], "schema_version")
    return version.removeprefix("ATIF-v") if isinstance(at(head[0], "steps"), list) else ""


def read_atif(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document or line, and of each sub-agent that is embedded in it."""
    for number, document in enumerate(records):
        yield from _traces(document, ledger, f"{name}#{number}", None)


def trace_row(trace: Trace) -> dict[str, Any]:
    """A trace as an ATIF object, valid for the models of Harbor 0.26."""
    known = {"model_name": trace.model, "tool_definitions": trace.tools}
    ours = {key: getattr(trace, key) for key in ("format", "prompt_origin", "parent", "passed")}
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": trace.trace_id,
        "trajectory_id": trace.trace_id,
        "agent": {"name": trace.agent or trace.format, "version": trace.version or "unknown"} | _given(known),
        "steps": [_step_row(step, idx) for idx, step in enumerate(trace.steps)],
        "extra": {_TRACE: {**ours, "format_version": trace.version, "state": asdict(trace.state)}},
    }


def trace_of(row: dict[str, Any]) -> Trace:
    """The trace that a line of ours holds."""
    return next(_traces(row, Ledger(), text_at(row, "trajectory_id"), None))


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing: false and 0 say something."""
    return {key: value for key, value in fields.items() if value or value == 0}


def _step_row(step: TraceStep, idx: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step_id": idx + 1, "source": step.source, "message": step.text}
    if step.source == "agent":
        results = [_result_row(result) for result in step.results]
        row |= _given(
            {
                "model_name": step.model,
                "reasoning_content": step.reasoning,
                "tool_calls": [_call_row(call) for call in step.calls],
                "observation": {"results": results} if results else None,
            }
        )
    parent = step.parent + 1 if step.parent != idx - 1 else None
    row |= _given({"extra": _given({"parent": parent, "flags": sorted(step.flags), "sealed": step.sealed})})
    return row | ({"is_copied_context": True} if "copied" in step.flags else {})


def _call_row(call: ToolCall) -> dict[str, Any]:
    arguments = parsed(call.arguments)
    row = {"tool_call_id": call.call_id, "function_name": call.name, "arguments": arguments}
    if not isinstance(arguments, dict):
        row |= {"arguments": {}, "extra": {"arguments_text": call.arguments}}
    return row


def _result_row(result: StepResult) -> dict[str, Any]:
    extra = _given({"is_error": result.is_error, "exit_code": result.exit_code})
    return {"content": result.text} | _given({"source_call_id": result.call_id, "extra": extra})


def _traces(document: Any, ledger: Ledger, name: str, parent: tuple[str, str] | None) -> Iterator[Trace]:
    ledger.put(lambda _: "kept: the document", document)
    ours, episode = at(document, "extra", _TRACE), at(document, "extra", _EPISODE)
    trace_id = text_at(document, "trajectory_id") or text_at(document, "session_id") or name
    trace = Trace(trace_id, text_at(ours, "format") or "atif", agent=text_at(document, "agent", "name"))
    trace.version = text_at(ours, "format_version") if ours else text_at(document, "schema_version")
    trace.tools = function_tools(at(document, "agent", "tool_definitions"))
    trace.state = RepositoryState(*(text_at(ours, "state", key) for key in RepositoryState.__slots__))
    take = partial(_add_step, TraceBuilder(trace), has_raw_calls=bool(episode))
    ledger.put_inner(take, items_at(document, "steps"))
    trace.model = text_at(document, "agent", "model_name") or trace.model
    has_prompt = bool(trace.tools) and trace.prompt_origin == "recorded"
    is_recorded = at(ours, "prompt_origin") == "recorded" if ours else has_prompt or bool(episode)
    trace.prompt_origin = "recorded" if is_recorded else "rebuilt"
    trace.parent, trace.passed = parent, typed(bool, at(ours, "passed"))
    match at(ours, "parent"):
        case [str(session), str(call_id)]:
            trace.parent = (session, call_id)
    if episode:
        trace.state = RepositoryState(text_at(episode, "task_id"))
        outcomes = at(episode, "score", "outcomes")
        if isinstance(outcomes, dict) and outcomes:
            trace.passed = set(outcomes.values()) == {"passed"} and not at(episode, "score", "error")
    yield trace
    for number, inner in enumerate(items_at(document, "subagent_trajectories")):
        ledger.num_records += 1
        yield from _traces(inner, ledger, f"{name}/{number}", (trace_id, ""))


def _add_step(builder: TraceBuilder, row: dict[str, Any], *, has_raw_calls: bool) -> None:
    source, extra = row.get("source"), row.get("extra") or {}
    if source not in ("system", "user", "agent"):
        raise Dropped("a step without a source")
    text, parts = text_of(row.get("message")), list(_answer_parts(row)) if source == "agent" else []
    if has_raw_calls:
        is_call = any(isinstance(part, ToolCall) for part in parts)
        text = _END_TOKENS.sub("", _RAW_CALL.split(text)[0].rstrip() if is_call else text)
    flags = [each for each in items_at(extra, "flags") if each in FLAGS]
    flags += ["copied"] if row.get("is_copied_context") is True else []
    parent = typed(int, at(extra, "parent"))
    builder.add(
        source,
        filter(None, [text, *parts]),
        *flags,
        parent=parent - 1 if parent is not None and 0 <= parent <= builder.last + 1 else None,
        model=row.get("model_name"),
    )


def _answer_parts(row: dict[str, Any]) -> Iterator[Part]:
    if thought := text_at(row, "reasoning_content"):
        yield Thought(thought)
    yield from (Thought("", typed(str, each) or "") for each in items_at(row, "extra", "sealed"))
    for call in items_at(row, "tool_calls"):
        written = at(call, "extra", "arguments_text")
        arguments = json_text(at(call, "arguments") if written is None else written)
        yield ToolCall(text_at(call, "function_name"), arguments, text_at(call, "tool_call_id"))
    for result in items_at(row, "observation", "results"):
        is_error, code = (at(result, "extra", key) for key in ("is_error", "exit_code"))
        call_id, text = text_at(result, "source_call_id"), text_of(at(result, "content"))
        yield StepResult(call_id, text, typed(bool, is_error), typed(int, code))
