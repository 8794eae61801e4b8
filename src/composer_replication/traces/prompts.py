"""Recorded calls, prompts and answers as our tools and the messages of a chat have them, and which steps are worth asking about.

``tool_names.toml`` has the one table of what the tools of other agents are called here.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.records import ToolCall
from composer_replication.rollouts.tools.tool_context import function_schema
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.traces.json_values import items_at, json_text, parsed, typed
from composer_replication.traces.trace_records import NOT_LEARNED, Trace

_SCHEMAS = [function_schema(tool) for tool in TOOLS]
_TAKES = {each["function"]["name"]: each["function"]["parameters"]["properties"] for each in _SCHEMAS}
_NAMES = tomllib.loads(Path(__file__).with_name("tool_names.toml").read_text(encoding="utf-8"))
_TOOLS = {foreign: name for name in _TAKES for foreign in (name, *_NAMES["tools"].get(name, ()))}
USUAL_FOLDER = "/testbed"  # where images of SWE-bench and its kin have the repository
EDITS = frozenset({"write_file", "str_replace"})
_PATCH = re.compile(
    r"\*\*\* Begin Patch\n\*\*\* (Add|Update) File: ([^\n]+)\n(?!\*\*\* )(?:@@[^\n]*\n)?((?:(?:[ +-][^\n]*)?\n)*[ +-][^\n]*\n)\n*\*\*\* End Patch"
)
"""A patch of Codex that adds a file or changes one place of one; others are no tool of ours."""
Message = dict[str, Any]  # of a chat, as templates take it: arguments of calls are objects where they can be
REBUILT_PROMPT = """\
You are a coding agent. You work in the root of a repository, through tools. The conversation so far was recorded; go on with \
the next answer."""
NO_RESULT = "(no result was recorded)"
OLD_RESULT_CHARACTERS = 2000
NUM_WHOLE_RESULTS = 6  # of the last steps; older ones are cut, the same way for every side of a comparison
WORTH: Mapping[str, int] = {"denied": 8, "interrupted": 6, "error": 4, "edit": 2}
"""How much a sign says that another answer may have been better: people's own objections first."""


def our_call(call: ToolCall, folder: str = "") -> ToolCall | None:
    """The call with our tool and arguments, paths relative to the session's ``folder``; None where we have no such tool."""
    given, folder = parsed(call.arguments or "{}"), folder or USUAL_FOLDER
    if not isinstance(given, dict):
        return None
    name = _TOOLS.get(call.name, "")
    patch = str(given.get("input") or given.get("cmd") or given.get("command"))
    if "*** Begin Patch" in patch and "apply_patch" in f"{call.name} {call.arguments}":
        if (found := _PATCH.search(patch)) is None:
            return None
        kind, path, lines = found[1], found[2].strip(), found[3].splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[:1] != left_out) for left_out in "+-")
        changed, added = {"old_str": old, "new_str": new}, {"content": f"{new}\n"}
        name = "write_file" if kind == "Add" else "str_replace"
        given = {"path": path, **(added if kind == "Add" else changed)}
    elif call.name in _NAMES["editor"]["names"]:
        name = str(_NAMES["editor"].get(str(given.get("command"))))
    if name not in _TAKES:
        return None
    renamed = {_NAMES["arguments"].get(key, key): value for key, value in given.items()}
    ours = {key: value for key, value in renamed.items() if key in _TAKES[name]}
    first, limit = (typed(int, given.get(key)) for key in ("offset", "limit"))
    if call.name == "Glob":
        ours["command"] = f"find . -path './{given.get('pattern', '')}'"
    elif call.name == "Read" and first is not None:
        ours |= {"first_line": first} | ({} if limit is None else {"last_line": first + limit - 1})
    elif name == "read_file" and len(lines := items_at(given, "view_range")) == 2:
        ours |= {"first_line": lines[0], "last_line": max(0, lines[1])}
    if words := [str(word) for word in items_at(ours, "command")]:  # of Codex, most often a shell's
        is_shell = words[:2] in (["bash", "-lc"], ["sh", "-c"]) and len(words) == 3
        ours["command"] = words[2] if is_shell else " ".join(words)
    if isinstance(path := ours.get("path"), str):
        ours["path"] = path.removeprefix(f"{folder}/")
    if isinstance(command := ours.get("command"), str):
        ours["command"] = command.replace(f"cd {folder} && ", "").replace(f"{folder}/", "")
    return ToolCall(name, json_text(ours), call.call_id)


def our_calls(trace: Trace, idx: int) -> list[ToolCall]:
    """The calls of a step with our tools, as far as there are any; others as they were."""
    return [our_call(call, trace.folder) or call for call in trace.steps[idx].calls]


def assistant_message(text: str, calls: list[ToolCall]) -> Message:
    """An answer."""
    message: Message = {"role": "assistant", "content": text}
    for number, call in enumerate(calls):
        given = parsed(call.arguments or "{}")
        function = {"name": call.name, "arguments": given if isinstance(given, dict) else call.arguments}
        row = {"id": call.call_id or f"call-{number}", "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(row)
    return message


def with_text(message: Message) -> Message:
    """The message with its calls' arguments as text, which servers want."""
    rows = [(call, call["function"]) for call in message.get("tool_calls", ())]
    calls = [{**call, "function": own | {"arguments": json_text(own["arguments"])}} for call, own in rows]
    return {**message, "tool_calls": calls} if calls else message


def recorded_answer(trace: Trace, idx: int) -> Message:
    """What was answered at a step, with our tools."""
    return assistant_message(trace.steps[idx].text, our_calls(trace, idx))


def calls_of(message: Message) -> list[ToolCall]:
    """The calls of an answer."""
    rows = [(call["function"], call["id"]) for call in message.get("tool_calls", ())]
    return [ToolCall(own["name"], json_text(own["arguments"]), call_id) for own, call_id in rows]


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
    return trace.tools if trace.tools and not trace.task_id else _SCHEMAS


class ChosenStep(NamedTuple):
    """A step that is asked again, why, and what each teacher answers; None of one that gave no answer."""

    trace: Trace
    idx: int
    reasons: list[str]
    answers: Mapping[str, Message | None] = {}

    @property
    def others(self) -> list[tuple[str, Message]]:
        """Answers that do something else than what was recorded, each once, with the first teacher that gave it."""
        found: dict[str, tuple[str, Message]] = {}
        for name, answer in self.answers.items():
            if answer is not None:
                found.setdefault(action(answer), (name, answer))
        found.pop(action(recorded_answer(self.trace, self.idx)), None)
        return list(found.values())

    def with_disagreement(self) -> ChosenStep:
        """With one more reason where another answer was given, and none where nothing else speaks for the step."""
        reasons = [reason for reason in self.reasons if reason != "any"]
        return self._replace(reasons=[*reasons, "disagreement"] if self.others else reasons)

    def row(self) -> dict[str, Any]:
        """A line of ``replay.jsonl``."""
        known = {"trace_id": self.trace.trace_id, "step": self.idx, "prompt_origin": self.trace.prompt_origin}
        answers = [{"teacher": name, "answer": answer} for name, answer in self.answers.items()]
        recorded = recorded_answer(self.trace, self.idx)
        return {**known, "reasons": self.reasons, "recorded": recorded, "answers": answers}


def chosen_steps(traces: list[Trace], max_steps: int, *, takes_all: bool = False) -> list[ChosenStep]:
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
                found.append(ChosenStep(trace, idx, reasons))
    return sorted(found, key=lambda each: -sum(WORTH.get(sign, 0) for sign in each.reasons))[:max_steps]
