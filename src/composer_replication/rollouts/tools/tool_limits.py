"""How much a tool may take, how long output is cut, and the shape of a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from composer_replication.interfaces import Sandbox
from composer_replication.records import ToolFault, ToolResult

_MIN_KEPT = 200


def clip(text: str, max_characters: int, how: str) -> tuple[str, bool]:
    """``text``, or its beginning and its end with a note between them; whether it was cut.

    Whole lines are left out where lines are short enough. The result is at most ``max_characters`` long, a quarter
    of it being the beginning: what commands and tests say last matters most.

    Args:
        text: what a tool would say.
        max_characters: at least 400.
        how: what to do to see the rest, for the note.
    """
    if max_characters < 2 * _MIN_KEPT:
        raise ValueError(f"max_characters must be at least {2 * _MIN_KEPT}, not {max_characters}")
    if len(text) <= max_characters:
        return text, False
    room = max_characters - len(_note(len(text), text.count("\n") + 1, how))
    head_end = max(room // 4, 0)
    tail_start = len(text) - max(room - head_end, 0)
    before, after = text.rfind("\n", 0, head_end) + 1, text.find("\n", tail_start)
    if head_end - before < _MIN_KEPT:
        head_end = before
    if 0 <= after < tail_start + _MIN_KEPT:
        tail_start = after + 1
    left_out = text[head_end:tail_start]
    note = _note(len(left_out), left_out.count("\n"), how)
    return (text[:head_end] + note + text[tail_start:])[:max_characters], True


def _note(num_characters: int, num_lines: int, how: str) -> str:
    return f"\n[... {num_characters} characters, {num_lines} lines left out: {how} ...]\n"


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of each call. The sandbox has limits of its own for memory, processes and disk.

    Args:
        max_characters: of one result, at least 1,000; the default is some 4,000 tokens, which a small context holds several times.
        max_command_seconds: the longest time-out of a command; one that asks for more gets so much.
        search_seconds: of one search, a slow regular expression included.
        test_seconds: of one run of the visible tests.
        max_file_bytes: of a file that is read, written or edited.
    """

    max_characters: int = 16_000
    max_command_seconds: float = 300.0
    search_seconds: float = 20.0
    test_seconds: float = 120.0
    max_file_bytes: int = 2 * 1024**2


class Bench(Protocol):
    """What a tool works with: the sandbox of an attempt, the variables of its commands, the limits of a call."""

    sandbox: Sandbox
    environment_variables: Mapping[str, str]
    limits: ToolLimits


def refused(text: str, fault: ToolFault = "") -> ToolResult:
    """The tool itself did not do it, and says why."""
    return ToolResult(text, is_error=True, fault=fault)
