"""What the tools of other agents are called here: one table, so that a recorded call can be executed and trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.rollouts.tools.tool_schemas import function_schema
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.traces.json_values import arguments_text, integer, items, parsed

_OURS: Mapping[str, set[str]] = {
    tool.name: set(function_schema(tool)["function"]["parameters"]["properties"]) for tool in TOOLS
}
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
_EDITORS = {"str_replace_editor", "file_editor"}
"""The editor of OpenHands and SWE-agent, which is several tools in one: its argument ``command`` says which."""
EDITS = frozenset({"write_file", "str_replace"})


def our_call(call: ToolCall, folder: str = "") -> ToolCall | None:
    """The call with our tool and arguments; None where we have no such tool or the arguments are no object.

    ``folder`` is where the session worked: absolute paths below it become relative.
    """
    given = parsed(call.arguments or "{}")
    if not isinstance(given, dict):
        return None
    foreign = str(given.get("command")) if call.name in _EDITORS else call.name
    name = _TOOLS.get(foreign, "")
    if not name or (call.name in _EDITORS and foreign not in ("view", "create", "str_replace")):
        return None
    renamed = {_ARGUMENTS.get(key, key): value for key, value in given.items()}
    ours = {key: _inside(value, key, folder) for key, value in renamed.items() if key in _OURS[name]}
    first, limit = (integer(given.get(key)) for key in ("offset", "limit"))
    lines = items(given.get("view_range"))
    if foreign == "Glob":
        ours["command"] = f"find . -path './{given.get('pattern', '')}'"
    elif words := [str(word) for word in items(ours.get("command"))]:  # of Codex, most often a shell's
        is_shell = words[:2] in (["bash", "-lc"], ["sh", "-c"]) and len(words) == 3
        ours["command"] = words[2] if is_shell else " ".join(words)
    elif foreign == "Read" and first is not None:
        ours |= {"first_line": first} | ({} if limit is None else {"last_line": first + limit - 1})
    elif foreign == "view" and len(lines) == 2:
        ours |= {"first_line": lines[0], "last_line": max(0, lines[1])}
    return ToolCall(name, arguments_text(ours), call.call_id)


def _inside(value: Any, name: str, folder: str) -> Any:
    if not (isinstance(value, str) and folder):
        return value
    if name == "command":
        return value.replace(f"cd {folder} && ", "").replace(f"{folder}/", "")
    return value.removeprefix(f"{folder}/") if name == "path" else value
