"""What instructions of every size are put together from: lists, code blocks, tests; each of bounded length."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_NAMES = 20
"""Names of tests or neighbours in one list; a prompt is short and the tree has the rest."""
MAX_SOURCES = 6
MAX_SOURCE_LINES = 30
MAX_LINE_CHARS = 400
"""Of a line of code: a test may hold a whole file in one."""


def tests_part(tests: Sequence[str], sources: Sequence[tuple[str, str]]) -> list[str]:
    """The tests that have to pass: their names, and the source of the first ones.

    Args:
        tests: node ids of visible tests.
        sources: path and source of visible test functions.
    """
    parts = [
        "This test fails now and has to pass:"
        if len(tests) == 1
        else "These tests fail now and have to pass:"
    ]
    names = [f"- {_short(test)}" for test in tests[:MAX_NAMES]]
    parts.append("\n".join([*names, *and_more(len(tests) - MAX_NAMES, "- and {} more")]))
    for path, source in sources[:MAX_SOURCES]:
        parts += [f"From `{path}`:", fenced(clipped(source))]
    return parts + and_more(len(sources) - MAX_SOURCES, "The tests have {} more functions.")


def listed(names: Sequence[str]) -> str:
    """Names in one line."""
    shown = [f"`{name}`" for name in names[:MAX_NAMES]]
    return ", ".join([*shown, *and_more(len(names) - MAX_NAMES, "{} more")])


def and_more(num_left: int, text: str) -> list[str]:
    """One sentence about what was left out; none when nothing was."""
    return [text.format(num_left)] if num_left > 0 else []


def clipped(source: str, max_lines: int = MAX_SOURCE_LINES) -> str:
    """The first lines of some code; the number of the others is said in a comment."""
    lines = [_short(line) for line in source.rstrip().splitlines()]
    left = len(lines) - max_lines
    return "\n".join([*lines[:max_lines], *and_more(left, "# {} more lines")])


def _short(line: str) -> str:
    left = len(line) - MAX_LINE_CHARS
    return line if left <= 0 else f"{line[:MAX_LINE_CHARS]} … {left} more characters"


def fenced(code: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}python\n{code}\n{fence}"
