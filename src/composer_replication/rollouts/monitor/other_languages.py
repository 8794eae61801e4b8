"""What one-liners of other languages say plainly: shell texts that they run, files that they name, remote addresses.

They are not parsed. Their quoted texts are looked at, which is what Python's own texts would be looked at for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from composer_replication.rollouts.monitor.shell_commands import ShellCommand

_CODE_OPTIONS = {
    "perl": "eE", "ruby": "e", "node": "e", "nodejs": "e", "php": "r", "lua": "e", "Rscript": "e", "tclsh": "", "deno": "", "bun": "e",
}  # fmt: skip
"""By program, the letters of the option whose value is code."""
_TEXT = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_QUOTED = re.compile(_TEXT, re.DOTALL)
_RUNS = re.compile(r"(?:\b(?:system|exec|execSync|execFileSync|spawn|spawnSync|popen|popen2|popen3|shell_exec|passthru|proc_open|execute|capture2|capture2e)\b\s*\(?\s*|\bqx\s*|%x\s*)" + _TEXT, re.DOTALL)  # fmt: skip
_BACKQUOTED = re.compile(r"`([^`]*)`")
_REMOTE = re.compile(r"[a-z]+://(?!localhost|127\.)|TCPSocket|IO::Socket|fsockopen|net\.connect")
_DECODES = re.compile(
    r"\bpack\b|decode64|base64_decode|frombase64|['\"]base64['\"]|unpack|atob", re.IGNORECASE
)
_LONGEST = 1_000_000


def other_code(command: ShellCommand) -> str:
    """The code of another language that a command holds; empty where it holds none."""
    program = re.sub(r"[\d.]+$", "", command.program)
    if program in ("awk", "gawk", "mawk", "nawk"):
        return next((word for word in command.arguments if not word.startswith("-")), "")[:_LONGEST]
    letters = _CODE_OPTIONS.get(program)
    if letters is None:
        return ""
    found: list[str] = []
    words = command.arguments
    for position, word in enumerate(words):
        option = re.fullmatch(rf"-\w*[{letters}](.*)|--eval|--print", word) if letters else None
        if option:
            found.append(option[1] or next(iter(words[position + 1 : position + 2]), ""))
    if not any(not word.startswith("-") for word in words) and command.stdin:
        found.append(command.stdin)
    return "\n".join(found)[:_LONGEST]


def shell_texts_of(code: str) -> Iterator[str]:
    """Texts that it hands to a shell."""
    for found in _RUNS.finditer(code):
        yield _plain(found[1])
    for found in _BACKQUOTED.finditer(code):
        yield found[1]


def paths_of(code: str) -> Iterator[str]:
    """Quoted texts that may be paths."""
    for found in _QUOTED.finditer(code):
        text = _plain(found[1])
        if 2 < len(text) < 1000 and "/" in text and not set(" \n") & set(text):
            yield text


def other_classes(command: ShellCommand) -> Iterator[str]:
    """The classes that the code itself belongs to."""
    code = other_code(command)
    if not code or command.program.endswith("awk"):
        return
    if _REMOTE.search(code):
        yield "network-attempt"
    if re.search(r"\beval\b", code) and _DECODES.search(code):
        yield "encoded-code"


def _plain(quoted: str) -> str:
    return re.sub(r"\\(.)", r"\1", quoted[1:-1])
