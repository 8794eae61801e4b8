"""One task for a person in a terminal: what it is, what it asks for, the broken place, its tests."""

from __future__ import annotations

from typing import Any


def render_task(row: dict[str, Any]) -> str:
    """The page of one task, from its row of ``tasks show DIR ID``.

    The row holds neither golden code nor the name of a hidden test, so the page does not.
    Control characters of a foreign source never reach the terminal.
    """
    facts = {
        "repository": row["repository"],
        "symbol": row["symbol"],
        "place": f"{row['path']}:{row['line']}",
        "deleted": f"{row['removal']} of a {row['granularity']}, {_count(row['num_body_lines'], 'line')}",
        "tests": f"{len(row['visible_tests'])} visible and {row['num_hidden_tests']} hidden fail without it, "
        f"{row['num_pass_to_pass']} pass with and without it",
        "environment": row["environment"][:12],
    }
    sections = [
        ("Broken place", row["broken_region"].splitlines()),
        ("Visible tests", row["visible_tests"]),
        ("Instruction", row["instruction"].splitlines()),
    ]
    lines = [row["task_id"], *(f"  {name:<12} {value}" for name, value in facts.items())]
    for title, texts in sections:
        lines += ["", title, *(f"  {text}".rstrip() for text in texts)]
    return _printable("\n".join(lines))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _printable(text: str) -> str:
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text
    )
