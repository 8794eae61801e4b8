"""A change of a tree as spans of text: small on disk, exact to the byte, reversible with the original."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from composer_replication.records import Edit, Hole

LINE_END = re.compile(r"\r\n|\r|\n")


class Lines:
    """Where each line of a text begins, and offsets for the positions that ``ast`` gives."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in LINE_END.finditer(text))]

    def line(self, number: int) -> str:
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[self.starts[number - 1] : end]

    def offset(self, number: int, column_bytes: int) -> int:
        line = self.line(number)
        return self.starts[number - 1] + len(line.encode()[:column_bytes].decode())

    def span(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        """Where the text of a piece of syntax begins and ends."""
        end = self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        return self.offset(node.lineno, node.col_offset), end

    def end_of_line(self, number: int) -> int:
        return self.starts[number - 1] + len(self.line(number).rstrip("\r\n"))

    def ends_line(self, node: ast.stmt) -> bool:
        """Whether nothing but a comment follows a statement on its last line."""
        rest = self.text[self.span(node)[1] : self.end_of_line(node.end_lineno or node.lineno)].strip()
        return not rest or rest.startswith("#")


def edited_text(text: str, edits: Iterable[Edit]) -> str:
    """A file after all its edits; their offsets are those of ``text``, their order does not matter.

    Raises:
        ValueError: two of them overlap, or one lies outside the text.
    """
    parts: list[str] = []
    position = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if not position <= edit.start <= edit.end <= len(text):
            raise ValueError(f"{edit.path}: the edit at {edit.start} overlaps another or leaves the file")
        parts += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*parts, text[position:]])


def edited_files(original: Mapping[str, bytes], edits: Iterable[Edit]) -> dict[str, bytes]:
    """The edited files alone, by path."""
    by_path: dict[str, list[Edit]] = {}
    for edit in edits:
        by_path.setdefault(edit.path, []).append(edit)
    missing = sorted(set(by_path) - set(original))
    if missing:
        raise ValueError(f"{missing[0]} is edited, but it is not in the tree")
    return {path: edited_text(original[path].decode(), own).encode() for path, own in sorted(by_path.items())}


def holes_of(edits: Sequence[Edit]) -> tuple[Hole, ...]:
    """Where the new text of each edit stands in the edited files, in order of path and place."""
    holes: list[Hole] = []
    shift, path = 0, None
    for edit in sorted(edits, key=lambda edit: (edit.path, edit.start, edit.end)):
        shift = shift if edit.path == path else 0
        path = edit.path
        start = edit.start + shift
        holes.append(Hole(edit.path, start, start + len(edit.text)))
        shift += len(edit.text) - (edit.end - edit.start)
    return tuple(holes)


def line_edits(path: str, old: str, new: str) -> tuple[Edit, ...]:
    """The edits, whole lines each, that turn one text into another."""
    before, after = Lines(old), Lines(new)
    a = [before.line(number) for number in range(1, len(before.starts) + 1)]
    b = [after.line(number) for number in range(1, len(after.starts) + 1)]
    ends = [*before.starts[1:], len(old)]
    edits = []
    for tag, first, last, other_first, other_last in difflib.SequenceMatcher(
        None, a, b, autojunk=False
    ).get_opcodes():
        if tag != "equal":
            start = before.starts[first] if first < len(a) else len(old)
            end = ends[last - 1] if last > first else start
            edits.append(Edit(path, start, end, "".join(b[other_first:other_last])))
    return tuple(edits)


def shifted_line(text: str, edits: Iterable[Edit], number: int) -> int:
    """Where a line of a file, counted from 1, stands after the file's edits.

    A line that an edit replaces keeps the place where the edit began.
    """
    offset = Lines(text).starts[number - 1]
    before = [edit for edit in edits if edit.start < offset]
    return number + sum(
        len(LINE_END.findall(edit.text)) - len(LINE_END.findall(text[edit.start : min(edit.end, offset)]))
        for edit in before
    )
