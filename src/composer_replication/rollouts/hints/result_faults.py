"""What a failed call's own words say went wrong.

Words count only where the call failed (an exit code other than 0, a refused tool, a time-out), and a missing file
or command only where the call itself names it: a file may well contain the text "No such file or directory", and
a test that has to fail first may fail with it.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from composer_replication.records import ToolCall, ToolResult
from composer_replication.rollouts.hints.call_faults import Finding

EDIT_TOOLS = frozenset(
    "apply_diff apply_patch create_file edit edit_file insert multi_edit patch replace replace_in_file "
    "str_replace str_replace_based_edit_tool str_replace_editor write write_file".split()
)
"""Tools that change files, by the names in use."""
COMMAND_NOT_FOUND = 127
KILLED = 137
KILLED_FOR_MEMORY = "[killed: it used more memory than it may]"
"""What our own tools say of a command that broke its memory limit, whatever its exit code."""

_UNKNOWN_TOOL = re.compile(
    r"(?:unknown|no such|unsupported) (?:tool|function)[:\s]*[`'\"]?(?P<subject>[\w.-]*)"
    r"|tool [`'\"]?(?P<other>[\w.-]+)[`'\"]? (?:not found|does not exist|is not available)",
    re.IGNORECASE,
)
_MISSING_FILE = (
    re.compile(r"(?:FileNotFoundError|ENOENT).*?['\"](?P<subject>[^'\"\n]+)['\"]"),
    re.compile(
        r"(?:cannot (?:access|open|stat)|can't (?:cd to|open(?: file)?|read|stat)) ['\"]?(?P<subject>[^'\":\n]+)['\"]?"
    ),
    re.compile(r"(?:^|: )(?:line \d+: )?(?P<subject>[^\s:'\"]+): No such file or directory", re.MULTILINE),
    re.compile(r"No such file or directory:? ['\"]?(?P<subject>[^'\"\n]*)"),
    re.compile(
        r"(?:file|path|directory) ['\"`]?(?P<subject>[^\s'\"`]+)['\"`]? (?:not found|does not exist)",
        re.IGNORECASE,
    ),
    re.compile(
        r"(?:file not found|no such file|path does not exist)[: ]+['\"`]?(?P<subject>[^\s'\"`]+)",
        re.IGNORECASE,
    ),
)
_COMMAND = (
    re.compile(r"(?:^|: )(?P<subject>[\w./+-]+): (?:command )?not found", re.MULTILINE),
    re.compile(r"command not found: (?P<subject>\S+)"),
)
_PERMISSION = re.compile(
    r"(?:(?P<subject>[\w./+-]+): )?(?:Permission denied|Operation not permitted|EACCES)|PermissionError"
)
_EDIT = re.compile(
    r"did not appear verbatim|(?:old_str\w*|old_string|search (?:block|text)|string to replace)\b[^\n]{0,80}?"
    r"(?:not found|no match|not unique|multiple|occurrence)|no (?:exact )?match(?:es)? (?:was |were )?found for"
    r"|multiple occurrences of|patch does not apply|patch failed|hunk #?\d+ FAILED|malformed patch|corrupt patch",
    re.IGNORECASE,
)
_SYNTAX = re.compile(
    r"^(?:E\s+)?(?P<subject>(?:SyntaxError|IndentationError|TabError): [^\n]*)", re.MULTILINE
)
_SYNTAX_PLACE = re.compile(
    r'File "(?P<path>[^"\n]+)", line \d+\n(?:[^\n]*\n){0,3}?(?:E\s+)?(?:SyntaxError|IndentationError|TabError)'
)
_IMPORT = re.compile(
    r"^(?:E\s+)?(?:ModuleNotFoundError: No module named ['\"](?P<subject>[\w.]+)"
    r"|ImportError: cannot import name ['\"](?P<other>\w+))",
    re.MULTILINE,
)
_MEMORY = re.compile(
    r"^MemoryError\b|out of memory|memory limit|limits?\.memory_bytes", re.MULTILINE | re.IGNORECASE
)
_PATCH_COMMAND = re.compile(r"\b(?:git apply|patch)\b")


def result_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    """What the result of one call shows, or None.

    A command that ends with an exit code above 0 and says none of these things is no fault: ``grep`` finds
    nothing, a test fails that has to fail first. A tool that says itself that it failed is one.
    """
    if not result.failed:
        return None
    text = result.text
    if result.timed_out:
        return "time-out", _line(text, None) or "the call was stopped", call.name
    if KILLED_FOR_MEMORY in text:
        return "out-of-memory", KILLED_FOR_MEMORY, call.name
    for read in (_tool_fault, _edit_fault, _code_fault, _command_fault, _file_fault, _memory_fault):
        if finding := read(call, result):
            return finding
    return ("tool-error", _line(text, None), call.name) if result.is_error and text.strip() else None


def _tool_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    found = _UNKNOWN_TOOL.search(result.text) if result.is_error else None
    if found is None:
        return None
    return "unknown-tool", _line(result.text, found), found["subject"] or found["other"] or call.name


def _edit_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    is_edit = call.name in EDIT_TOOLS or _PATCH_COMMAND.search(call.arguments) is not None
    found = _EDIT.search(result.text) if is_edit else None
    return ("edit-not-applied", _line(result.text, found), call.name) if found else None


def _code_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    del call
    if found := _SYNTAX.search(result.text):
        place = _SYNTAX_PLACE.search(result.text)
        return "syntax-error", found["subject"][:200], place["path"] if place else ""
    if found := _IMPORT.search(result.text):
        return "import-error", _line(result.text, found), found["subject"] or found["other"]
    return None


def _command_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    if result.exit_code not in (COMMAND_NOT_FOUND, None):
        return None
    for pattern in _COMMAND:
        if (found := pattern.search(result.text)) and _is_named(found["subject"], call):
            return "command-not-found", _line(result.text, found), found["subject"]
    return None


def _file_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    found = _PERMISSION.search(result.text)
    if found and found["subject"] and _is_named(found["subject"], call):
        return "permission-denied", _line(result.text, found), found["subject"]
    for pattern in _MISSING_FILE:
        for found in pattern.finditer(result.text):
            if _is_named(found["subject"], call):
                return "missing-file", _line(result.text, found), found["subject"].strip()
    return None


def _memory_fault(call: ToolCall, result: ToolResult) -> Finding | None:
    found = _MEMORY.search(result.text) if result.exit_code == KILLED else None
    return ("out-of-memory", _line(result.text, found), call.name) if found else None


def _is_named(subject: str, call: ToolCall) -> bool:
    """Whether the call itself speaks of a path or command; the environment may tell the whole path."""
    name = PurePosixPath(subject.strip()).name
    return bool(name) and name in call.arguments


def _line(text: str, found: re.Match[str] | None) -> str:
    """The line of a match, else the first line that says something; at most 200 characters."""
    if found is None:
        return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]
    at = next(
        (place for place in range(found.start(), found.end()) if not text[place].isspace()), found.start()
    )
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[begin : end if end >= 0 else len(text)].strip()[:200]
