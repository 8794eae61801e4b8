"""The findings as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.escapes.attempt import Attempt

ESCAPED, HELD, NOT_RUN, UNTRIED = "ESCAPED", "held", "not run", "COULD NOT BE TRIED"
WITHOUT_JAIL = ("none", "control")


def summary_row(
    backend: str, user: str, rows: Sequence[dict[str, Any]], attempts: Sequence[Attempt]
) -> dict[str, Any]:
    """One line of the table; ``applicable`` are those of ``attempts`` that say something about it."""
    tried = [row for row in rows if row["state"] in {ESCAPED, HELD}]
    applicable = [
        attempt
        for attempt in attempts
        if attempt.only_for in {"", user} and not (backend in WITHOUT_JAIL and attempt.not_without_jail)
    ]
    return {
        "backend": backend,
        "user": user,
        "attempts": len(tried),
        "applicable": len(applicable),
        "families": len({row["family"] for row in tried}),
        "could_not_be_tried": sum(row["state"] not in {ESCAPED, HELD, NOT_RUN} for row in rows),
        "names": [f"{row['family']}: {row['name']}" for row in tried if row["state"] == ESCAPED],
    }


def markdown(summaries: Sequence[dict[str, Any]]) -> str:
    """The table as it stands in the documentation."""
    lines = ["| backend | user | attempts tried | families | successes |", "|---|---|---|---|---|"]
    for row in summaries:
        user = "ordinary" if row["user"] == "user" else row["user"]
        names = f": {'; '.join(row['names'])}" if row["names"] and row["backend"] not in WITHOUT_JAIL else ""
        tried = f"{row['attempts']} of {row['applicable']}"
        lines.append(
            f"| {row['backend']} | {user} | {tried} | {row['families']} | {len(row['names'])}{names} |"
        )
    return "\n".join(lines)


def unseen(control: Sequence[dict[str, Any]]) -> list[str]:
    """Attempts that the control ran and whose success no judge saw there."""
    return [f"{row['family']}: {row['name']}" for row in control if row["state"] == HELD]
