"""Lines of texts that name a deleted symbol as an entry of documentation; entry points are in ``entry_points``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from composer_replication.records import Edit
from composer_replication.tasks.intake.tree_rules import in_test_folder, is_licence_text
from composer_replication.tasks.planning.entry_points import CONFIGURATION, entry_point_edits
from composer_replication.tasks.planning.lines import Lines

_TEXT_SUFFIXES = frozenset({".rst", ".md", ".markdown"})
_DOTTED = r"~?!?(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)(?:\([^()]*\))?"
_DIRECTIVE = re.compile(
    rf"^\s*\.\.\s+(?:py:)?(?:auto)?(?:function|class|method|module|exception|data|attribute|property)::\s*{_DOTTED}\s*$"
)
_ENTRY = re.compile(
    rf"^\s*(?:[-*+•]|\d+[.)])\s+(?::\w+:)?[\[`*_]*{_DOTTED}[`*_]*(?:\](?:\([^)]*\)|\[[^\]]*\])?)?[`*_]*\s*(?:$|[-–—:(,].*$)"
)
_ROW = re.compile(
    rf"^\s*\|\s*(?::\w+:)?[\[`*_]*{_DOTTED}[`*_]*(?:\](?:\([^)]*\)|\[[^\]]*\])?)?[`*_]*\s*\|.*$"
)
_BARE = re.compile(rf"^\s+{_DOTTED}\s*$")


def reference_edits(
    files: Mapping[str, bytes], names: Iterable[str], methods: Iterable[str] = ()
) -> tuple[Edit, ...]:
    """The edits that take out lines about deleted symbols.

    Args:
        files: the repository.
        names: absolute dotted names, ``package.module.symbol``; a line may have any tail of one.
        methods: ``package.module.Class.method``; a line must have at least ``Class.method``.

    Returns:
        Whole lines of texts (``.. autofunction:: name`` with its options, list entries, table
        rows, bare lines of a summary), and the entry points of ``entry_point_edits``.
    """
    wanted = frozenset(names)
    by_tail: dict[str, set[str]] = {}
    for name in wanted:
        for tail in _tails(name):
            by_tail.setdefault(name.rpartition(".")[2], set()).add(tail)
    for name in methods:
        for tail in _tails(name):
            if "." in tail:
                by_tail.setdefault(name.rpartition(".")[2], set()).add(tail)
    edits: list[Edit] = []
    for path in sorted(files):
        pure = PurePosixPath(path)
        if pure.name in CONFIGURATION:
            edits += entry_point_edits(path, files[path], wanted)
        elif _is_documentation(pure):
            edits += _gone_lines(path, files[path], by_tail)
    return tuple(edits)


def _is_documentation(path: PurePosixPath) -> bool:
    """A text of the project about itself: no data of a test or a package, and not its licence."""
    if in_test_folder(path) or is_licence_text(path):
        return False
    return path.suffix in _TEXT_SUFFIXES or path.name.startswith("README")


def _gone_lines(path: str, content: bytes, by_tail: Mapping[str, set[str]]) -> list[Edit]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return []
    if not any(tail in text for tail in by_tail):
        return []
    lines = Lines(text)
    rows = [lines.line(number) for number in range(1, len(lines.starts) + 1)]
    gone: list[int] = []
    for index, row in enumerate(rows):
        if gone and gone[-1] >= index:
            continue
        body = row.rstrip("\r\n")
        if _is_entry(body, by_tail):
            gone += range(index, index + 1 + (_num_below(rows, index) if _DIRECTIVE.match(body) else 0))
    ends = [*lines.starts[1:], len(text)]
    return [Edit(path, lines.starts[index], ends[index], "") for index in gone]


def _tails(name: str) -> list[str]:
    """``a.b.c``, ``b.c`` and ``c``."""
    parts = name.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]


def _is_entry(row: str, by_tail: Mapping[str, set[str]]) -> bool:
    for pattern in (_DIRECTIVE, _ENTRY, _ROW, _BARE):
        match = pattern.match(row)
        if match:
            written = match["name"]
            if written in by_tail.get(written.rpartition(".")[2], ()):
                return True
    return False


def _num_below(rows: list[str], index: int) -> int:
    """How many lines belong to a directive: deeper indented, blank ones between them included."""
    depth = len(rows[index]) - len(rows[index].lstrip())
    count = 0
    for offset, row in enumerate(rows[index + 1 :], 1):
        if not row.strip():
            continue
        if len(row) - len(row.lstrip()) <= depth:
            break
        count = offset
    return count
