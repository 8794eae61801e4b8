"""Entry points (console scripts, plug-ins) that lead to a deleted symbol, in the files that declare them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator

from composer_replication.records import Edit
from composer_replication.tasks.planning.lines import Lines
from composer_replication.tasks.planning.text_cuts import parses_after

CONFIGURATION = frozenset({"pyproject.toml", "setup.cfg", "setup.py", "entry_points.txt"})
_TARGET = r"\s*(?P<module>[\w.]+)\s*:\s*(?P<name>[\w.]+)\s*(?:\[[^\]]*\])?\s*"
_LINE = re.compile(rf"^\s*[\w.\"'-]+\s*=\s*[\"']?{_TARGET}[\"']?\s*,?\s*(?:#.*)?$")
_INSTALLED = re.compile(r"^\s*[^=]+=\s*(?P<module>[\w.]+)\s*(?::\s*(?P<name>[\w.]+))?\s*(?:\[[^\]]*\])?\s*$")
"""In ``entry_points.txt``, where a plug-in may also be a whole module."""
_IN_A_LIST = re.compile(rf"(?P<quote>[\"'])\s*[\w.-]+\s*={_TARGET}(?P=quote)")
"""``"name = module:function"`` between brackets of ``setup.py``."""
_IN_A_TABLE = re.compile(rf"[\w.\"'-]+\s*=\s*(?P<quote>[\"']){_TARGET}(?P=quote)")
"""``name = "module:function"`` between braces of ``pyproject.toml``."""
_LIST_BEFORE = re.compile(r"[\[(,](?:\s|#[^\n]*\n)*\Z")
_TABLE_BEFORE = re.compile(r"[{,]\s*\Z")
_COMMA_BEFORE = re.compile(r",\s*\Z")
_COMMA_AFTER = re.compile(r"\s*,\s*")


def entry_point_edits(path: str, content: bytes, wanted: Collection[str]) -> list[Edit]:
    """The edits that take out entry points which lead to one of the symbols, or into one.

    Args:
        path: ends in one of ``CONFIGURATION``.
        content: of the file.
        wanted: absolute dotted names of symbols and modules.

    Returns:
        Whole lines, and entries of a list or table that stands on one line. None of a ``setup.py``
        that would not parse without them, or of a file that is not UTF-8.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return []
    lines = Lines(text)
    ends = [*lines.starts[1:], len(text)]
    line_of = _INSTALLED if path.endswith("entry_points.txt") else _LINE
    whole = [
        Edit(path, start, end, "")
        for start, end in zip(lines.starts, ends, strict=True)
        if _leads_to(line_of.match(text[start:end].rstrip("\r\n")), wanted)
    ]
    gone = {edit.start for edit in whole}
    items = [
        span
        for span in _items(path, text, wanted)
        if lines.starts[bisect_right(lines.starts, span[0]) - 1] not in gone
    ]
    edits = [*whole, *(Edit(path, start, end, "") for start, end in _with_commas(text, items))]
    return edits if not path.endswith(".py") or parses_after(text, edits) else []


def _leads_to(match: re.Match[str] | None, wanted: Collection[str]) -> bool:
    said = ".".join(filter(None, (match["module"], match["name"]))) if match else ""
    return any(said == name or said.startswith(name + ".") for name in wanted)


def _items(path: str, text: str, wanted: Collection[str]) -> Iterator[tuple[int, int]]:
    """The items of lists and tables; what stands elsewhere, such as the value of a dict, stays."""
    pattern, opened, closing = (
        (_IN_A_LIST, _LIST_BEFORE, (",", "]", ")"))
        if path.endswith(".py")
        else (_IN_A_TABLE, _TABLE_BEFORE, (",", "}"))
    )
    for match in pattern.finditer(text):
        is_item = opened.search(text, 0, match.start()) and text[match.end() :].lstrip().startswith(closing)
        if _leads_to(match, wanted) and is_item:
            yield match.span()


def _with_commas(text: str, items: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Each item with the comma before it, or the one after it where that before is gone or was never there."""
    last = 0
    for start, end in items:
        before = _COMMA_BEFORE.search(text, last, start)
        after = None if before else _COMMA_AFTER.match(text, end)
        last = after.end() if after else end
        yield before.start() if before else start, last
