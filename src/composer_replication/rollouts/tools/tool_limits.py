"""How much a tool may take, and the shape of a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from composer_replication.interfaces import Sandbox
from composer_replication.records import ToolFault, ToolResult


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
