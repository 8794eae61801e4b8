"""The Agent Trajectory Interchange Format (ATIF) of the Harbor project: read leniently from 1.0 to 1.8, written as 1.7.

A line of ours holds in ``extra.composer_replication_trace`` what the format has no field for, so that it is read back as it was.
Episodes that our own agent loop wrote are ATIF too, and know their task and score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.readers.chat_messages import function_tools
from composer_replication.traces.trace_records import (
    FLAGS,
    Ledger,
    RepositoryState,
    StepResult,
    Trace,
    TraceBuilder,
    TraceStep,
    arguments_text,
    integer,
    items,
    mapping,
    string,
    text_of,
)

WRITTEN_VERSION = "ATIF-v1.7"
_TRACE = "composer_replication_trace"
_EPISODE = "composer_replication"
_RAW_CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_calls?_|<｜tool▁call")
"""Where the markup of a call begins in an answer of our own loop, which keeps what was sampled as it is."""
_END_TOKENS = re.compile(r"\s*<\|(?:im_end|eot_id|eom_id|endoftext|end)\|>\s*$")
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


def matches_atif(head: Sequence[Any]) -> str:
    """The version that the document names."""
    first = mapping(head[0] if head else None)
    version = string(first.get("schema_version"))
    has_steps = isinstance(first.get("steps"), list)
    return version.removeprefix("ATIF-v") if has_steps and ("agent" in first or version) else ""


def read_atif(records: Iterator[Any], ledger: Ledger, name: str) -> Iterator[Trace]:
    """One conversation of each document or line, and of each sub-agent that is embedded in it."""
    for number, document in enumerate(map(mapping, records)):
        ledger.kept("the document")
        yield from _traces(document, ledger, f"{name}#{number}", None)


def trace_row(trace: Trace) -> dict[str, Any]:
    """A trace as an ATIF object, valid for the models of Harbor 0.26."""
    agent: dict[str, Any] = {"name": trace.agent or trace.format, "version": trace.version or "unknown"}
    if trace.model:
        agent["model_name"] = trace.model
    if trace.tools:
        agent["tool_definitions"] = trace.tools
    ours = {
        "format": trace.format,
        "format_version": trace.version,
        "prompt_origin": trace.prompt_origin,
        "state": asdict(trace.state),
        "parent": trace.parent,
        "passed": trace.passed,
    }
    return {
        "schema_version": WRITTEN_VERSION,
        "session_id": trace.trace_id,
        "trajectory_id": trace.trace_id,
        "agent": agent,
        "steps": [_step_row(step, idx) for idx, step in enumerate(trace.steps)],
        "extra": {_TRACE: ours},
    }


def trace_of(row: Mapping[str, Any]) -> Trace:
    """The trace that a line of ours holds."""
    return next(_traces(row, Ledger(), string(row.get("trajectory_id")), None))


def _step_row(step: TraceStep, idx: int) -> dict[str, Any]:
    row: dict[str, Any] = {"step_id": idx + 1, "source": step.source, "message": step.text}
    extra: dict[str, Any] = {}
    if step.timestamp:
        extra["time"] = step.timestamp
    if step.parent != idx - 1:
        extra["parent"] = step.parent + 1
    if step.flags:
        extra["flags"] = sorted(step.flags)
    if "copied" in step.flags:
        row["is_copied_context"] = True
    if step.source == "agent":
        row |= _answer_fields(step)
        if step.sealed:
            extra["sealed"] = step.sealed
    if extra:
        row["extra"] = extra
    return row


def _answer_fields(step: TraceStep) -> dict[str, Any]:
    fields: dict[str, Any] = {"model_name": step.model, "reasoning_content": step.reasoning}
    fields["tool_calls"] = [_call_row(call) for call in step.calls]
    fields["metrics"] = {key: step.usage[key] for key in _COUNTS if key in step.usage}
    if step.results:
        fields["observation"] = {"results": [_result_row(result) for result in step.results]}
    return {key: value for key, value in fields.items() if value}


def _call_row(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    row = {"tool_call_id": call.call_id, "function_name": call.name, "arguments": arguments}
    if not isinstance(arguments, dict):
        row |= {"arguments": {}, "extra": {"arguments_text": call.arguments}}
    return row


def _result_row(result: StepResult) -> dict[str, Any]:
    row: dict[str, Any] = {"content": result.text}
    if result.call_id:
        row["source_call_id"] = result.call_id
    known = {
        "is_error": result.is_error,
        "exit_code": result.exit_code,
        "is_truncated": result.is_truncated or None,
    }
    extra = {key: value for key, value in known.items() if value is not None}
    return row | ({"extra": extra} if extra else {})


def _traces(
    document: Mapping[str, Any], ledger: Ledger, name: str, parent: tuple[str, str] | None
) -> Iterator[Trace]:
    ours = mapping(mapping(document.get("extra")).get(_TRACE))
    episode = mapping(mapping(document.get("extra")).get(_EPISODE))
    agent = mapping(document.get("agent"))
    trace_id = string(document.get("trajectory_id")) or string(document.get("session_id")) or name
    trace = Trace(
        trace_id, string(ours.get("format")) or "atif", agent=string(agent.get("name")), parent=parent
    )
    trace.version = string(ours.get("format_version") if ours else document.get("schema_version"))
    trace.model = string(agent.get("model_name"))
    trace.tools = function_tools(agent.get("tool_definitions"))
    state = {key: string(value) for key, value in mapping(ours.get("state")).items()}
    trace.state = RepositoryState(**{key: state.get(key, "") for key in RepositoryState.__slots__})
    builder = TraceBuilder(trace)
    steps = items(document.get("steps"))
    ledger.num_records += len(steps)
    for step in steps:
        why = _add_step(builder, step, has_raw_calls=bool(episode))
        ledger.dropped(why) if why else ledger.mapped()
    has_system = any(step.source == "system" for step in trace.steps)
    trace.prompt_origin = "recorded" if episode or (has_system and trace.tools) else "rebuilt"
    if ours:
        trace.prompt_origin = "recorded" if ours.get("prompt_origin") == "recorded" else "rebuilt"
        own_parent = items(ours.get("parent"))
        trace.parent = (string(own_parent[0]), string(own_parent[1])) if len(own_parent) == 2 else parent
        trace.passed = ours["passed"] if isinstance(ours.get("passed"), bool) else None
    if episode:
        _note_episode(trace, episode)
    yield trace
    for number, inner in enumerate(map(mapping, items(document.get("subagent_trajectories")))):
        ledger.num_records += 1
        ledger.kept("the document")
        yield from _traces(inner, ledger, f"{name}/{number}", (trace_id, ""))


def _add_step(builder: TraceBuilder, step: Any, *, has_raw_calls: bool) -> str:
    row = mapping(step)
    source, extra = row.get("source"), mapping(row.get("extra"))
    text = text_of(row.get("message"))
    if source not in ("system", "user", "agent"):
        return "a step without a source"
    made = TraceStep(source, text, timestamp=string(row.get("timestamp")) or string(extra.get("time")))
    builder.add(made)
    parent = integer(extra.get("parent"))
    if parent is not None and 0 <= parent < len(builder.trace.steps):
        made.parent = parent - 1
    made.flags = {flag for flag in map(string, items(extra.get("flags"))) if flag in FLAGS}
    if row.get("is_copied_context") is True:
        made.flags.add("copied")
    results = items(mapping(row.get("observation")).get("results"))
    if source != "agent":
        return ""
    made.reasoning, made.model = string(row.get("reasoning_content")), string(row.get("model_name"))
    made.sealed = [string(each) for each in items(extra.get("sealed"))]
    metrics = mapping(row.get("metrics"))
    made.usage = {key: metrics[key] for key in _COUNTS if type(metrics.get(key)) is int}
    for call in map(mapping, items(row.get("tool_calls"))):
        written = mapping(call.get("extra")).get("arguments_text", call.get("arguments"))
        call_id = string(call.get("tool_call_id"))
        builder.call(made, ToolCall(string(call.get("function_name")), arguments_text(written), call_id))
    for result in map(mapping, results):
        _add_result(builder, made, result)
    if has_raw_calls and made.calls:
        made.text = _RAW_CALL.split(made.text)[0].rstrip()
    made.text = _END_TOKENS.sub("", made.text) if has_raw_calls else made.text
    return ""


def _add_result(builder: TraceBuilder, step: TraceStep, row: Mapping[str, Any]) -> None:
    extra = mapping(row.get("extra"))
    call_id = string(row.get("source_call_id"))
    result = StepResult(call_id, text_of(row.get("content")))
    is_error = extra.get("is_error")
    result.is_error = is_error if isinstance(is_error, bool) else None
    result.exit_code = integer(extra.get("exit_code"))
    result.is_truncated = extra.get("is_truncated") is True
    if not call_id and not step.calls:  # the observation of an answer whose commands stand in its text
        step.results.append(result)
    else:
        builder.result(result)


def _note_episode(trace: Trace, episode: Mapping[str, Any]) -> None:
    """Task and outcome of an episode of ours."""
    trace.state = RepositoryState(task_id=string(episode.get("task_id")))
    outcomes = mapping(mapping(episode.get("score")).get("outcomes"))
    if outcomes:
        has_error = bool(mapping(episode["score"]).get("error"))
        trace.passed = not has_error and all(outcome == "passed" for outcome in outcomes.values())
