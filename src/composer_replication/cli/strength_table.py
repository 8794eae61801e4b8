"""The table of ``tasks stats`` that says how many mutants of the golden code the tests of each repository kill."""

from __future__ import annotations

from typing import Any


def strength_lines(strength: dict[str, Any]) -> list[str]:
    """A line for each repository and one for all; none where nobody measured.

    Args:
        strength: ``by_repo`` and ``total`` of ``tasks stats``, counts each.
    """
    total = strength["total"]
    if not total["tasks"]:
        return []
    rows = [*strength["by_repo"].items(), ("all", total)]
    lines = [
        "Mutants of the golden code that are killed",
        " tasks  mutants  by visible tests  and with what is hidden",
        *(_line(name, row) for name, row in rows if row["tasks"]),
    ]
    if total["not_measured"]:
        lines.append(f"{total['not_measured']:>6}  tasks whose strength was not measured")
    return lines


def _line(name: str, row: dict[str, int]) -> str:
    visible, both = (_killed(row[key], row["mutants"]) for key in ("killed_visible", "killed_all"))
    return f"{row['tasks']:>6}  {row['mutants']:>7}  {visible:>16}  {both:>23}  {name}"


def _killed(number: int, mutants: int) -> str:
    """The count with its share; where no mutant was made there is none."""
    return f"{number} {f'{number / mutants:.1%}' if mutants else '-':>6}"
