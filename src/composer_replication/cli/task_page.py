"""One task for a person in a terminal of 80 columns: what it is, what it asks for, where, its tests."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator
from typing import Any

from composer_replication.cli.visible_text import visible

WIDTH = 80
_INDENT = "  "


def render_task(row: dict[str, Any]) -> str:
    """The page of one task, from its row of ``tasks show DIR ID``.

    Without ``golden_patch`` the row holds neither golden code nor the name of a hidden test, so the
    page does not, and says in one line what would show the patch. Prose is wrapped, code is cut at
    the margin (``--json`` has it in full) but for the patch, whose lines are whole; control characters
    of a foreign source never reach the terminal.
    """
    lines = [*_wrapped(_printable(row["task_id"]), "")]
    for name, value in _facts(row):
        lines += _wrapped(f"{name:<12} {_printable(value)}", _INDENT, hang=" " * 13)
    sections = [
        ("Broken places" if row["num_holes"] > 1 else "Broken place", _code(row["broken_region"])),
        (
            "Visible tests",
            [line for test in row["visible_tests"] for line in _wrapped(_printable(test), _INDENT)],
        ),
        ("Instruction", [*_markdown(row["instruction"])]),
    ]
    written = row["written_instruction"]
    if written:
        sections.append(
            (_cut(f"Instruction, written by {_printable(written['model'])}"), [*_markdown(written["text"])])
        )
    for title, texts in sections:
        lines += ["", title, *texts]
    if "golden_patch" in row:
        lines += ["", "Golden patch", *visible(row["golden_patch"]).removesuffix("\n").split("\n")]
    return "\n".join(lines)


def _facts(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "repository", row["repository"]
    yield "symbol", row["symbol"]
    yield "place", row["path"] if row["line"] is None else f"{row['path']}:{row['line']}"
    others = [path for path in row["files"] if path != row["path"]]
    if others:
        yield "other files", ", ".join(others)
    what = f"body of a {row['granularity']}" if row["removal"] == "body" else f"a whole {row['granularity']}"
    yield "deleted", f"{what}, {_count(row['num_body_lines'], 'line')}"
    visible, hidden = len(row["visible_tests"]), row["num_hidden_tests"]
    fail = f"{visible} visible and {hidden} hidden fail without it"
    yield "tests", f"{fail}, {row['num_pass_to_pass']} pass with and without it"
    if row["num_recorded"]:
        yield "behaviour", f"recorded of {_count(row['num_recorded'], 'function')}: a hidden truth, too"
    strength = row["strength"]
    if strength:
        noticed = f"the visible tests notice {strength['killed_visible']}"
        both = f"with what is hidden {strength['killed_all']}"
        yield "strength", f"of {strength['mutants']} wrong variants of the code {noticed}, {both}"
    for number, measured in enumerate(row["difficulty"]):
        yield "" if number else "difficulty", _difficulty(measured)
    if row["outdated_difficulty"]:
        evaluations = _count(row["outdated_difficulty"], "evaluation")
        told = f"not counted: {evaluations} with other tests, or by a version that did not note them"
        yield "" if row["difficulty"] else "difficulty", told
    yield "environment", row["environment"][:12]
    if row.get("proved_by"):
        yield "proven in", " and ".join(row["proved_by"])
    if "golden_patch" not in row:
        yield "golden patch", "shown with --golden"


def _difficulty(measured: dict[str, Any]) -> str:
    policy, (low, high) = measured["policy"], measured["ci95"]
    hidden = measured["num_hidden_passed"]
    return (
        f"{policy['name']} at temperature {policy['temperature']:g}: {measured['num_passed']} of "
        f"{measured['num_samples']} pass, {measured['pass_rate']:.3f} [{low:.3f}, {high:.3f}]"
        + ("" if hidden is None else f"; hidden {hidden} of {measured['num_samples']}")
    )


def _markdown(text: str) -> Iterator[str]:
    """Prose wrapped, what stands between fences cut."""
    fence = ""
    for line in text.splitlines():
        mark = line[: len(line) - len(line.lstrip("`"))]
        if fence:
            fence = "" if line == fence else fence
        elif len(mark) >= 3:
            fence = mark
        else:
            yield from _wrapped(_printable(line), _INDENT, hang="  " if line.startswith("- ") else "")
            continue
        yield from _code(line)


def _code(text: str) -> list[str]:
    return [_cut(f"{_INDENT}{_printable(line)}".rstrip()) for line in text.splitlines()]


def _cut(line: str) -> str:
    """The line as far as the terminal goes; a sign that takes two columns counts as two."""
    if _columns(line) <= WIDTH:
        return line
    while _columns(line) > WIDTH - 1:
        line = line[:-1] if len(line) <= WIDTH else line[:WIDTH]
    return f"{line}…"


def _wrapped(text: str, indent: str, hang: str = "") -> list[str]:
    """Lines of at most ``WIDTH`` columns; words that are longer are broken."""
    if not text.strip():
        return [""]
    is_wide = _columns(text) > len(text)
    return textwrap.wrap(
        text,
        WIDTH // 2 if is_wide else WIDTH,  # each sign may take two columns
        initial_indent=indent,
        subsequent_indent=indent + hang,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )


def _columns(text: str) -> int:
    return sum(1 + (unicodedata.east_asian_width(sign) in "WF") for sign in text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text.expandtabs(4))
