"""A change of a tree as spans of text: small on disk, exact to the byte, reversible with the original; and a task's trees."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from composer_replication.records import Edit, Hole
from composer_replication.tasks.intake.cache import sha256_of

LINE_END = re.compile(r"\r\n|\r|\n")


class Lines:
    """Where each line of a text begins, and offsets for the positions that ``ast`` gives."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in LINE_END.finditer(text))]

    def line(self, number: int) -> str:
        start, *following = self.starts[number - 1 : number + 1]
        return self.text[start : following[0] if following else None]

    def offset(self, number: int, column_bytes: int) -> int:
        line = self.line(number)
        return self.starts[number - 1] + len(line.encode()[:column_bytes].decode())

    def span(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        """Where the text of a piece of syntax begins and ends."""
        end = self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        return self.offset(node.lineno, node.col_offset), end

    def end_of_line(self, number: int) -> int:
        return self.starts[number - 1] + len(self.line(number).rstrip("\r\n"))

    def ending_after(self, offset: int) -> str:
        """The first line end from an offset on, empty where none follows."""
        found = LINE_END.search(self.text, offset)
        return found[0] if found else ""

    def ends_line(self, node: ast.stmt) -> bool:
        """Whether nothing but a comment follows a statement on its last line."""
        rest = self.text[self.span(node)[1] : self.end_of_line(node.end_lineno or node.lineno)].strip()
        return not rest or rest.startswith("#")


def edited_text(text: str, edits: Iterable[Edit]) -> str:
    """A file after all its edits, in whatever order; a ValueError where two overlap, or one lies outside the text."""
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
    by_path: dict[str, list[Edit]] = defaultdict(list)
    for edit in edits:
        by_path[edit.path].append(edit)
    if missing := sorted(set(by_path) - set(original)):
        raise ValueError(f"{missing[0]} is edited, but it is not in the tree")
    return {path: edited_text(original[path].decode(), own).encode() for path, own in sorted(by_path.items())}


def holes_of(edits: Sequence[Edit]) -> tuple[Hole, ...]:
    """Where the new text of each edit stands in the edited files, in order of path and place."""
    holes: list[Hole] = []
    shifts: dict[str, int] = defaultdict(int)
    for edit in sorted(edits, key=lambda edit: (edit.path, edit.start, edit.end)):
        start = edit.start + shifts[edit.path]
        holes.append(Hole(edit.path, start, start + len(edit.text)))
        shifts[edit.path] += len(edit.text) - (edit.end - edit.start)
    return tuple(holes)


def line_edits(path: str, old: str, new: str) -> tuple[Edit, ...]:
    """The edits, whole lines each, that turn one text into another."""
    before, after = Lines(old), Lines(new)
    a, b = ([lines.line(number) for number in range(1, len(lines.starts) + 1)] for lines in (before, after))
    starts = [*before.starts, len(old)]
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return tuple(
        Edit(path, starts[first], starts[last], "".join(b[other_first:other_last]))
        for tag, first, last, other_first, other_last in matcher.get_opcodes()
        if tag != "equal"
    )


def shifted_line(text: str, edits: Iterable[Edit], number: int) -> int:
    """Where a line of a file, counted from 1, stands after the file's edits; a replaced one where its edit began."""
    offset = Lines(text).starts[number - 1]
    for edit in edits:
        if edit.start < offset:
            gone = text[edit.start : min(edit.end, offset)]
            number += len(LINE_END.findall(edit.text)) - len(LINE_END.findall(gone))
    return number


# --- The trees that one task has, by who looks.
#
# rollout: broken source, the visible tests that are shown; what a policy's tools may see
# visible: the same with the paid tests that are not shown, to grade by all visible tests
# hidden: broken source, all tests; only ever in a grading sandbox of its own
# golden: everything as it was

View = Literal["rollout", "visible", "hidden", "golden"]


@dataclass(frozen=True, slots=True)
class Changes:
    """How the trees of a task differ from the original; see ``TaskRecord``."""

    edits: tuple[Edit, ...]
    removed_files: tuple[str, ...] = ()
    test_edits: tuple[Edit, ...] = ()
    visible_edits: tuple[Edit, ...] = ()
    shown_edits: tuple[Edit, ...] | None = None

    def edits_of_tests(self, view: str) -> tuple[Edit, ...]:
        """How the test files of a view differ from the original; ``golden`` is no such view."""
        if view == "rollout" and self.shown_edits is not None:
            return self.shown_edits
        return self.test_edits if view == "hidden" else self.visible_edits

    @property
    def source_files(self) -> tuple[str, ...]:
        """Every file that is not as it was, tests aside."""
        return tuple(sorted({*(edit.path for edit in self.edits), *self.removed_files}))

    def golden_code(self, original: Mapping[str, bytes]) -> str:
        """The deleted text, span after span, removed files last. Never to be shown to a policy."""
        texts = {path: original[path].decode("utf-8", "replace") for path in self.source_files}
        spans = (texts[edit.path][edit.start : edit.end] for edit in self.edits)
        return "\n".join([*spans, *(texts[path] for path in self.removed_files)])


def view_files(original: Mapping[str, bytes], changes: Changes, view: str) -> dict[str, bytes]:
    """The files of one ``View``, of all files of the repository; a ValueError where the edits do not fit them."""
    if view not in get_args(View):
        raise ValueError(f"{view!r} is not one of {', '.join(get_args(View))}")
    if view == "golden":
        return dict(original)
    files = {**original, **edited_files(original, (*changes.edits_of_tests(view), *changes.edits))}
    if missing := sorted(set(changes.removed_files) - set(files)):
        raise ValueError(f"{missing[0]} is removed, but it is not in the tree")
    return {path: data for path, data in files.items() if path not in changes.removed_files}


def tree_sha256(digests: Mapping[str, str]) -> str:
    """One hash over a tree: sha256 of the lines ``SHA256 PATH`` in the order of the paths."""
    return sha256_of("\n".join(f"{digests[path]} {path}" for path in sorted(digests)).encode())


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a tree; every file is new, so no link can lead a write astray."""
    # Plain calls: a build writes hundreds of thousands of small files.
    for parent in {os.path.dirname(f"{folder}/{name}") for name in files}:
        os.makedirs(parent, exist_ok=True)
    for name, data in files.items():
        with open(f"{folder}/{name}", "xb") as handle:
            handle.write(data)
