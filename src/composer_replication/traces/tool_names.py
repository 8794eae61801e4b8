"""What the tools of other agents are called here: one table, so that a recorded call can be executed and trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from composer_replication.records import ToolCall

_ARGUMENTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Bash": ("bash", {"command": "command"}),
    "bash": ("bash", {"command": "command"}),
    "exec_command": ("bash", {"cmd": "command"}),
    "shell": ("bash", {"command": "command"}),
    "terminal": ("bash", {"command": "command"}),
    "execute_bash": ("bash", {"command": "command"}),
    "run_shell_command": ("bash", {"command": "command"}),
    "Read": ("read_file", {"file_path": "path"}),
    "read_file": ("read_file", {"file_path": "path", "path": "path"}),
    "Write": ("write_file", {"file_path": "path", "content": "content"}),
    "write_file": ("write_file", {"file_path": "path", "path": "path", "content": "content"}),
    "Edit": ("str_replace", {"file_path": "path", "old_string": "old_str", "new_string": "new_str"}),
    "replace": ("str_replace", {"file_path": "path", "old_string": "old_str", "new_string": "new_str"}),
    "str_replace": ("str_replace", {"path": "path", "old_str": "old_str", "new_str": "new_str"}),
    "Grep": ("search", {"pattern": "pattern", "path": "path"}),
    "search_file_content": ("search", {"pattern": "pattern", "path": "path"}),
    "Glob": ("bash", {"pattern": "command"}),
    "LS": ("list_files", {"path": "path"}),
    "list_directory": ("list_files", {"path": "path"}),
    "finish": ("submit", {}),
    "submit": ("submit", {}),
}
_OWN = ("list_files", "search", "run_tests")
EDITS = frozenset({"write_file", "str_replace"})


def our_call(call: ToolCall, folder: str = "") -> ToolCall | None:
    """The call with our tool and arguments; None where we have no such tool or the arguments are no object.

    ``folder`` is where the session worked: absolute paths below it become relative.
    """
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    if call.name in ("str_replace_editor", "file_editor"):
        return _editor(call, arguments, folder)
    if call.name in _OWN:
        return ToolCall(call.name, call.arguments, call.call_id)
    known = _ARGUMENTS.get(call.name)
    if known is None:
        return None
    name, names = known
    ours = {
        names[key]: _inside(value, names[key], folder) for key, value in arguments.items() if key in names
    }
    if call.name == "shell" and isinstance(ours.get("command"), list):
        words = ours["command"]
        ours["command"] = (
            words[2]
            if words[:2] in (["bash", "-lc"], ["sh", "-c"]) and len(words) == 3
            else " ".join(map(str, words))
        )
    if call.name == "Glob":
        ours["command"] = f"find . -path './{arguments.get('pattern', '')}'"
    if call.name == "Read" and isinstance(arguments.get("offset"), int):
        ours["first_line"] = arguments["offset"]
        if isinstance(arguments.get("limit"), int):
            ours["last_line"] = arguments["offset"] + arguments["limit"] - 1
    return ToolCall(name, json.dumps(ours, ensure_ascii=False), call.call_id)


def _editor(call: ToolCall, arguments: Mapping[str, Any], folder: str) -> ToolCall | None:
    """The editor of OpenHands and SWE-agent, which is several tools in one."""
    path = _inside(arguments.get("path"), "path", folder)
    command = arguments.get("command")
    if command == "view":
        ours: dict[str, Any] = {"path": path}
        lines = arguments.get("view_range")
        if isinstance(lines, list) and len(lines) == 2:
            ours |= {"first_line": lines[0], "last_line": max(0, lines[1])}
        return ToolCall("read_file", json.dumps(ours), call.call_id)
    if command == "create":
        ours = {"path": path, "content": arguments.get("file_text")}
        return ToolCall("write_file", json.dumps(ours, ensure_ascii=False), call.call_id)
    if command == "str_replace":
        ours = {"path": path, "old_str": arguments.get("old_str"), "new_str": arguments.get("new_str", "")}
        return ToolCall("str_replace", json.dumps(ours, ensure_ascii=False), call.call_id)
    return None


def _inside(value: Any, name: str, folder: str) -> Any:
    if isinstance(value, str) and folder:
        if name == "path" and value.startswith(f"{folder}/"):
            return value[len(folder) + 1 :]
        if name == "command":
            return value.replace(f"{folder}/", "").replace(f"cd {folder} && ", "")
    return value
