"""The findings as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ESCAPED, HELD, NOT_RUN = "ESCAPED", "held", "not run"


def count(rows: Sequence[dict[str, Any]], state: str) -> int:
    """How many came to that."""
    return sum(row["state"] == state for row in rows)


def summary_row(backend: str, user: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table."""
    tried = [row for row in rows if row["state"] in {ESCAPED, HELD}]
    return {
        "backend": backend,
        "user": user,
        "attempts": len(tried),
        "families": len({row["family"] for row in tried}),
        "successes": count(tried, ESCAPED),
        "not_run": count(rows, NOT_RUN),
        "could_not_be_tried": len(rows) - len(tried) - count(rows, NOT_RUN),
        "names": [f"{row['family']}: {row['name']}" for row in tried if row["state"] == ESCAPED],
    }


def render(summaries: Sequence[dict[str, Any]]) -> str:
    """The table."""
    head = ("backend", "user", "attempts", "families", "successes", "not run", "could not be tried")
    lines = [
        f"{head[0]:<18}{head[1]:<8}{head[2]:>9}{head[3]:>9}{head[4]:>10}{head[5]:>9}  {head[6]}",
    ]
    lines += [
        f"{row['backend']:<18}{row['user']:<8}{row['attempts']:>9}{row['families']:>9}{row['successes']:>10}"
        f"{row['not_run']:>9}  {row['could_not_be_tried']}"
        for row in summaries
    ]
    return "\n".join(lines)


def unseen(control: Sequence[dict[str, Any]]) -> list[str]:
    """Attempts that the control ran and whose success no judge saw there."""
    return [f"{row['family']}: {row['name']}" for row in control if row["state"] == HELD]
