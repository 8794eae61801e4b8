"""What the tools of other agents are called here: one table, so that a recorded call can be executed and trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.records import ToolCall
from composer_replication.traces.json_values import arguments_text, parsed

_EDIT = {"file_path": "path", "old_string": "old_str", "new_string": "new_str"}
_WRITE = {"file_path": "path", "path": "path", "content": "content", "file_text": "content"}
_OWN_EDIT = {"path": "path", "old_str": "old_str", "new_str": "new_str"}
_READ = {"file_path": "path", "path": "path", "first_line": "first_line", "last_line": "last_line"}
_TABLE: Mapping[str, tuple[str, Mapping[str, str]]] = {
    **dict.fromkeys(
        ("Bash", "bash", "exec_command", "shell", "terminal", "execute_bash"),
        ("bash", {"command": "command", "cmd": "command"}),
    ),
    "Glob": ("bash", {"pattern": "command"}),
    **dict.fromkeys(("Read", "read_file", "view"), ("read_file", _READ)),
    **dict.fromkeys(("Write", "write_file", "create"), ("write_file", _WRITE)),
    "Edit": ("str_replace", _EDIT),
    "str_replace": ("str_replace", _OWN_EDIT),
    "Grep": ("search", {"pattern": "pattern", "path": "path"}),
    "LS": ("list_files", {"path": "path"}),
    **dict.fromkeys(("finish", "submit"), ("submit", {})),
}
_EDITORS = {"str_replace_editor", "file_editor"}
"""The editor of OpenHands and SWE-agent, which is several tools in one."""
EDITS = frozenset({"write_file", "str_replace"})


def our_call(call: ToolCall, folder: str = "") -> ToolCall | None:
    """The call with our tool and arguments; None where we have no such tool or the arguments are no object.

    ``folder`` is where the session worked: absolute paths below it become relative.
    """
    given = parsed(call.arguments or "{}")
    if not isinstance(given, dict):
        return None
    if call.name in ("list_files", "search", "run_tests"):
        return call
    foreign = str(given.get("command")) if call.name in _EDITORS else call.name
    known = _TABLE.get(foreign)
    if known is None or (call.name in _EDITORS and foreign not in ("view", "create", "str_replace")):
        return None
    name, names = known
    ours = {names[key]: _inside(value, names[key], folder) for key, value in given.items() if key in names}
    lines = given.get("view_range")
    if isinstance(ours.get("command"), list):  # of Codex: the words of a command, most often a shell's
        words = [str(word) for word in ours["command"]]
        ours["command"] = (
            words[2] if words[:2] in (["bash", "-lc"], ["sh", "-c"]) and len(words) == 3 else " ".join(words)
        )
    elif call.name == "Glob":
        ours["command"] = f"find . -path './{given.get('pattern', '')}'"
    elif isinstance(given.get("offset"), int):
        ours["first_line"] = given["offset"]
        ours |= (
            {"last_line": given["offset"] + given["limit"] - 1} if isinstance(given.get("limit"), int) else {}
        )
    elif foreign == "view" and isinstance(lines, list) and len(lines) == 2:
        ours |= {"first_line": lines[0], "last_line": max(0, lines[1])}
    return ToolCall(name, arguments_text(ours), call.call_id)


def _inside(value: Any, name: str, folder: str) -> Any:
    if isinstance(value, str) and folder and name in ("path", "command"):
        value = value.replace(f"cd {folder} && ", "") if name == "command" else value
        return value.replace(f"{folder}/", "") if name == "command" else value.removeprefix(f"{folder}/")
    return value
