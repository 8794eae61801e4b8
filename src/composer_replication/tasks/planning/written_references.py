"""Lines of texts that name a deleted symbol as an entry: documentation lists and console scripts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from composer_replication.records import Edit
from composer_replication.tasks.planning.lines import Lines

_TEXT_SUFFIXES = frozenset({".rst", ".md", ".txt", ".markdown"})
_CONFIGURATION = frozenset({"pyproject.toml", "setup.cfg"})
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
_SCRIPT = re.compile(
    r"^\s*[\w.\"'-]+\s*=\s*[\"']?(?P<module>[\w.]+)\s*:\s*(?P<name>[\w.]+)\s*(?:\[[^\]]*\])?\s*[\"']?\s*,?\s*(?:#.*)?$"
)


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
        rows, bare lines of a summary) and of ``pyproject.toml`` and ``setup.cfg`` (entry points).
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
        if pure.name in _CONFIGURATION:
            edits += _gone_lines(path, files[path], wanted, by_tail, is_text=False)
        elif pure.suffix in _TEXT_SUFFIXES or pure.name.startswith("README"):
            edits += _gone_lines(path, files[path], wanted, by_tail, is_text=True)
    return tuple(edits)


def _gone_lines(
    path: str, content: bytes, wanted: frozenset[str], by_tail: Mapping[str, set[str]], *, is_text: bool
) -> list[Edit]:
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
        if is_text and _is_entry(body, by_tail):
            gone += range(index, index + 1 + (_num_below(rows, index) if _DIRECTIVE.match(body) else 0))
        elif not is_text and _is_script(body, wanted):
            gone.append(index)
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


def _is_script(row: str, wanted: frozenset[str]) -> bool:
    match = _SCRIPT.match(row)
    if match is None:
        return False
    said = f"{match['module']}.{match['name']}"
    return any(said == name or said.startswith(name + ".") for name in wanted)


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
