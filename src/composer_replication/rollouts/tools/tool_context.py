"""What a tool works with, how it refuses, and how long its answer may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from composer_replication.interfaces import Sandbox
from composer_replication.records import ToolFault

MAX_FILE_BYTES = 2 * 1024**2
"""Of a file that is read, written, edited or searched."""
_MIN_KEPT = 200


class RefusedError(Exception):
    """The tool does not do it; the text says why and what to do instead, ``fault`` what it is to a hint."""

    def __init__(self, text: str, fault: ToolFault = "") -> None:
        super().__init__(text)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class VisibleTests:
    """The tests that ``run_tests`` runs.

    ``files`` are put back before each run: tests, their data and their configuration, as stored. ``is_left_out``
    tells which files of the tree grading will not take from it.
    """

    node_ids: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    import_roots: tuple[str, ...] = (".",)
    options: tuple[str, ...] = ()
    is_left_out: Callable[[str], bool] = field(default=lambda _: False, repr=False, compare=False)


@dataclass(slots=True)
class CallCounts:
    """Calls so far; ``num_invalid`` are those that could not be made: unknown tool, bad JSON, wrong arguments,
    or after the end. A command that fails, or a file that is not there, is a valid call.
    """

    num_calls: int = 0
    num_invalid: int = 0


@dataclass(slots=True)
class ToolContext:
    """What the tools of one attempt work with; the sandbox has limits of its own for memory, processes and disk.

    ``is_over`` is set by ``submit``, or by whoever ends the attempt; from then on every call is refused.

    Args:
        sandbox: where they work.
        tests: what ``run_tests`` runs.
        environment_variables: of every command, over those of the sandbox.
        max_characters: of one answer, at least 1,000; 16,000 are some 4,000 tokens, which a small context holds several
            times.
    """

    sandbox: Sandbox
    tests: VisibleTests
    environment_variables: Mapping[str, str] = field(default_factory=dict)
    max_characters: int = 16_000
    counts: CallCounts = field(default_factory=CallCounts)
    is_over: bool = False


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
