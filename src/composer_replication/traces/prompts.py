"""Recorded prompts and answers as messages of a chat, and which steps are worth asking about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tools.tool_schemas import function_schema
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.traces.json_values import arguments_text, parsed
from composer_replication.traces.tool_names import EDITS, our_call
from composer_replication.traces.trace_records import NOT_LEARNED, Trace, TraceStep

Message = dict[str, Any]
"""Of a chat, as chat templates take it: arguments of calls are objects where they can be."""
REBUILT_PROMPT = """\
You are a coding agent. You work in the root of a repository, through tools. The conversation so far was recorded; go on with \
the next answer."""
NO_RESULT = "(no result was recorded)"
OLD_RESULT_CHARACTERS = 2000
NUM_WHOLE_RESULTS = 6
"""Results of so many last answers stay whole; older ones are cut, the same way for every side of a comparison."""
WORTH: Mapping[str, int] = {"denied": 8, "interrupted": 6, "error": 4, "edit": 2}
"""How much a sign says that another answer may have been better: people's own objections first."""


def our_calls(trace: Trace, step: TraceStep) -> list[ToolCall]:
    """The calls of a step with our tools, as far as there are any; others as they were."""
    return [our_call(call, trace.state.folder) or call for call in step.calls]


def assistant_message(text: str, calls: list[ToolCall]) -> Message:
    """An answer."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.call_id or f"call-{n}",
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for n, call in enumerate(calls)
        ]
    return message


def recorded_answer(trace: Trace, idx: int) -> Message:
    """What was answered at a step, with our tools."""
    return assistant_message(trace.steps[idx].text, our_calls(trace, trace.steps[idx]))


def calls_of(message: Message) -> list[ToolCall]:
    """The calls of an answer."""
    functions = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
    return [ToolCall(own["name"], arguments_text(own["arguments"]), call_id) for call_id, own in functions]


def action(message: Message) -> str:
    """What an answer does: its calls, however their arguments are spelled; its text where it calls nothing."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps(functions, sort_keys=True) if functions else str(message["content"]).strip()


def prompt_of(trace: Trace, idx: int) -> list[Message]:
    """The chat before step ``idx``; one that was not recorded begins with our own words."""
    path = [trace.steps[place] for place in trace.path_to(idx)]
    messages = [] if trace.prompt_origin == "recorded" else [{"role": "system", "content": REBUILT_PROMPT}]
    whole_from = len(path) - NUM_WHOLE_RESULTS
    for place, step in enumerate(path):
        if step.source != "agent":
            messages.append({"role": step.source, "content": step.text})
        elif "synthetic" not in step.flags:
            calls = our_calls(trace, step)
            messages.append(assistant_message(step.text, calls))
            messages += _results(step, calls, is_whole=place >= whole_from)
    return messages


def tools_of(trace: Trace) -> list[dict[str, Any]]:
    """What may be called: our tools, or those of the recorded prompt where they are others and it is kept as it was."""
    keeps_its_own = trace.tools and not trace.state.task_id
    return trace.tools if keeps_its_own else [function_schema(tool) for tool in TOOLS]


def reasons_of(trace: Trace, idx: int) -> list[str]:
    """Why another answer may have been better than step ``idx``; none where nothing says so."""
    step = trace.steps[idx]
    if step.flags & NOT_LEARNED:
        return []
    signs: list[str] = [flag for flag in ("denied", "interrupted") if flag in step.flags]
    signs += ["error"] if step.num_errors else []
    return signs + (["edit"] if any(call.name in EDITS for call in our_calls(trace, step)) else [])


def chosen_steps(
    traces: list[Trace], max_steps: int, *, takes_all: bool = False
) -> list[tuple[Trace, int, list[str]]]:
    """The steps that are asked about, the most telling ones first and then in their order.

    Left out are steps without a prompt (a session of which only the tools were recorded) and answers that are no choice.
    """
    found = []
    for trace in traces:
        for idx, step in trace.agent_steps():
            is_any = takes_all and not step.flags & NOT_LEARNED
            reasons = reasons_of(trace, idx) or (["any"] if is_any else [])
            if reasons and any(trace.steps[place].source == "user" for place in trace.path_to(idx)):
                found.append((trace, idx, reasons))
    return sorted(found, key=lambda each: -sum(WORTH.get(reason, 0) for reason in each[2]))[:max_steps]


def _results(step: TraceStep, calls: list[ToolCall], *, is_whole: bool) -> list[Message]:
    known = {result.call_id: result.text for result in step.results}
    messages = []
    for number, call in enumerate(calls):
        text = known.get(call.call_id, NO_RESULT)
        if not is_whole and len(text) > OLD_RESULT_CHARACTERS:
            text = f"{text[:OLD_RESULT_CHARACTERS]}\n(cut)"
        messages.append({"role": "tool", "tool_call_id": call.call_id or f"call-{number}", "content": text})
    return messages


def _arguments(call: ToolCall) -> Any:
    value = parsed(call.arguments or "{}")
    return value if isinstance(value, dict) else call.arguments
