"""Recorded calls, prompts and answers as our tools and the messages of a chat have them, and which steps are worth asking about.

One table says what the tools of other agents are called here, so that a recorded call can be executed and trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tools.tool_schemas import function_schema
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.traces.json_values import items_at, json_text, parsed, typed
from composer_replication.traces.trace_records import NOT_LEARNED, Trace

_SCHEMAS = [function_schema(tool) for tool in TOOLS]
_OURS = {each["function"]["name"]: each["function"]["parameters"]["properties"] for each in _SCHEMAS}
"""Our tools, and what they take."""
_TOOLS: Mapping[str, str] = {
    **{name: name for name in _OURS},
    **dict.fromkeys(("Bash", "Glob", "exec_command", "shell", "terminal", "execute_bash"), "bash"),
    **dict.fromkeys(("Read", "view"), "read_file"),
    **dict.fromkeys(("Write", "create"), "write_file"),
    "Edit": "str_replace",
    "Grep": "search",
    "LS": "list_files",
    "finish": "submit",
}
_ARGUMENTS = {
    "cmd": "command", "file_path": "path", "old_string": "old_str", "new_string": "new_str", "file_text": "content",
}  # fmt: skip
USUAL_FOLDER = "/testbed"
"""Where images of SWE-bench and its kin have the repository."""
_EDITORS = {"str_replace_editor", "file_editor"}
"""The editor of OpenHands and SWE-agent, which is several tools in one: its argument ``command`` says which."""
EDITS = frozenset({"write_file", "str_replace"})
_PATCH = re.compile(
    r"\*\*\* Begin Patch\n\*\*\* (Add|Update) File: ([^\n]+)\n(?!\*\*\* )(.*?)\n\*\*\* End Patch", re.DOTALL
)
"""A patch of Codex: a file is added, or places of one are changed."""
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


def our_call(call: ToolCall, folder: str = "") -> ToolCall | None:
    """The call with our tool and arguments; None where we have no such tool or the arguments are no object.

    ``folder`` is where the session worked: absolute paths below it become relative.
    """
    given = parsed(call.arguments or "{}")
    if not isinstance(given, dict):
        return None
    patch = _PATCH.search(str(given.get("input") or given.get("cmd") or given.get("command")))
    if patch is not None and "apply_patch" in f"{call.name} {call.arguments}":
        return _patched(call, patch, folder)
    foreign = str(given.get("command")) if call.name in _EDITORS else call.name
    name = _TOOLS.get(foreign, "")
    if not name or (call.name in _EDITORS and foreign not in ("view", "create", "str_replace")):
        return None
    renamed = {_ARGUMENTS.get(str(key), str(key)): value for key, value in given.items()}
    ours: dict[str, Any] = {
        key: _inside(value, key, folder) for key, value in renamed.items() if key in _OURS[name]
    }
    first, limit = (typed(int, given.get(key)) for key in ("offset", "limit"))
    lines = items_at(given, "view_range")
    if foreign == "Glob":
        ours["command"] = f"find . -path './{given.get('pattern', '')}'"
    elif words := [str(word) for word in items_at(ours, "command")]:  # of Codex, most often a shell's
        is_shell = words[:2] in (["bash", "-lc"], ["sh", "-c"]) and len(words) == 3
        ours["command"] = words[2] if is_shell else " ".join(words)
    elif foreign == "Read" and first is not None:
        ours |= {"first_line": first} | ({} if limit is None else {"last_line": first + limit - 1})
    elif foreign == "view" and len(lines) == 2:
        ours |= {"first_line": lines[0], "last_line": max(0, lines[1])}
    return ToolCall(name, json_text(ours), call.call_id)


def _patched(call: ToolCall, patch: re.Match[str], folder: str) -> ToolCall | None:
    """A patch that adds one file or changes one place of it; None for others."""
    hunks = [hunk for hunk in re.split(r"(?m)^@@.*(?:\n|\Z)", patch[3]) if hunk]
    if len(hunks) != 1 or "\n*** " in patch[3]:
        return None
    lines = hunks[0].rstrip("\n").split("\n")
    old, new = ("\n".join(line[1:] for line in lines if line[:1] != left_out) for left_out in "+-")
    given = {"path": _inside(patch[2].strip(), "path", folder)}
    if patch[1] == "Add":
        return ToolCall("write_file", json_text({**given, "content": f"{new}\n"}), call.call_id)
    return ToolCall("str_replace", json_text({**given, "old_str": old, "new_str": new}), call.call_id)


def _inside(value: Any, name: str, folder: str) -> Any:
    """A path, or a command, as it is spelled inside the folder."""
    if name not in ("path", "command") or not isinstance(value, str):
        return value
    folder = folder or USUAL_FOLDER
    if name == "path":
        return value.removeprefix(f"{folder}/")
    return value.replace(f"cd {folder} && ", "").replace(f"{folder}/", "")


def our_calls(trace: Trace, idx: int) -> list[ToolCall]:
    """The calls of a step with our tools, as far as there are any; others as they were."""
    return [our_call(call, trace.state.folder) or call for call in trace.steps[idx].calls]


def assistant_message(text: str, calls: list[ToolCall]) -> Message:
    """An answer."""
    message: Message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.call_id or f"call-{n}", "type": "function", "function": _function(call)}
            for n, call in enumerate(calls)
        ]
    return message


def _function(call: ToolCall) -> dict[str, Any]:
    value = parsed(call.arguments or "{}")
    return {"name": call.name, "arguments": value if isinstance(value, dict) else call.arguments}


def recorded_answer(trace: Trace, idx: int) -> Message:
    """What was answered at a step, with our tools."""
    return assistant_message(trace.steps[idx].text, our_calls(trace, idx))


def calls_of(message: Message) -> list[ToolCall]:
    """The calls of an answer."""
    functions = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
    return [ToolCall(own["name"], json_text(own["arguments"]), call_id) for call_id, own in functions]


def action(message: Message) -> str:
    """What an answer does: its calls, however their arguments are spelled; its text where it calls nothing."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps(functions, sort_keys=True) if functions else str(message["content"]).strip()


def prompt_of(trace: Trace, idx: int) -> list[Message]:
    """The chat before step ``idx``; one that was not recorded begins with our own words."""
    path = trace.path_to(idx)
    messages = [] if trace.prompt_origin == "recorded" else [{"role": "system", "content": REBUILT_PROMPT}]
    for number, place in enumerate(path):
        step = trace.steps[place]
        if step.source != "agent":
            messages.append({"role": step.source, "content": step.text})
        elif "synthetic" not in step.flags:
            answer = recorded_answer(trace, place)
            messages.append(answer)
            known = {result.call_id: result.text for result in step.results}
            for call in calls_of(answer):
                text = known.get(call.call_id, NO_RESULT)
                if number < len(path) - NUM_WHOLE_RESULTS and len(text) > OLD_RESULT_CHARACTERS:
                    text = f"{text[:OLD_RESULT_CHARACTERS]}\n(cut)"
                messages.append({"role": "tool", "tool_call_id": call.call_id, "content": text})
    return messages


def tools_of(trace: Trace) -> list[dict[str, Any]]:
    """What may be called: our tools, or those of the recorded prompt where they are others and it is kept as it was."""
    return trace.tools if trace.tools and not trace.state.task_id else _SCHEMAS


def chosen_steps(
    traces: list[Trace], max_steps: int, *, takes_all: bool = False
) -> list[tuple[Trace, int, list[str]]]:
    """The steps at which another answer may have been better, with the signs of it, the most telling ones first.

    Left out are steps without a prompt (a session of which only the tools were recorded) and answers that are no choice.
    """
    found = []
    for trace in traces:
        for idx, step in trace.agent_steps():
            is_edit = any(call.name in EDITS for call in our_calls(trace, idx))
            signs = {**dict.fromkeys(step.flags, True), "error": step.num_errors > 0, "edit": is_edit}
            reasons = [sign for sign in WORTH if signs.get(sign)] or (["any"] if takes_all else [])
            is_choice = bool(reasons) and not step.flags & NOT_LEARNED
            if is_choice and any(trace.steps[place].source == "user" for place in trace.path_to(idx)):
                found.append((trace, idx, reasons))
    return sorted(found, key=lambda each: -sum(WORTH.get(reason, 0) for reason in each[2]))[:max_steps]
