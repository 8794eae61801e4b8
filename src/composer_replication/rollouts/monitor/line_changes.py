"""Which lines of a text are new? Exact where that is cheap; a large text is first cut at the lines that stand in both once."""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

_LARGEST_DIFF = 4_000_000
"""Product of line counts up to which the exact difference is sought; above it lines are compared as a bag."""
_MOST_PAIRS = 200_000
"""The same for pairs of equal lines: the exact difference may look at all of them once for each line."""
_Part = tuple[Sequence[str], Sequence[str], int]
"""Lines before, lines after, and how many lines of the whole text after come before these."""


def new_lines(before: str, after: str) -> set[int]:
    """Numbers (from 1) of the lines of ``after`` that are not lines of ``before`` in the same order."""
    whole = _trimmed(before.splitlines(), after.splitlines(), 0)
    parts = [whole] if _is_small(whole, 0, 0) else list(_cut(whole))
    found: set[int] = set()
    size = pairs = 0
    for part in parts:
        if _is_small(part, size, pairs):
            size, pairs = size + _size(part), pairs + _num_pairs(part)
            found |= _exact(part)
        else:
            found |= _by_bag(part)
    return found


def _trimmed(old: Sequence[str], new: Sequence[str], offset: int) -> _Part:
    """Without the lines that both begin with, and that both end with."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return old[start : len(old) - end], new[start : len(new) - end], offset + start


def _size(part: _Part) -> int:
    return len(part[0]) * len(part[1])


def _num_pairs(part: _Part) -> int:
    known = Counter(part[0])
    return sum(known[line] * count for line, count in Counter(part[1]).items())


def _is_small(part: _Part, size: int, pairs: int) -> bool:
    """Whether the exact difference is cheap, after so much work of the like."""
    return size + _size(part) <= _LARGEST_DIFF and pairs + _num_pairs(part) <= _MOST_PAIRS


def _exact(part: _Part) -> set[int]:
    old, new, offset = part
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return {
        offset + 1 + line
        for kind, _, _, first, last in matcher.get_opcodes()
        if kind in ("insert", "replace")
        for line in range(first, last)
    }


def _by_bag(part: _Part) -> set[int]:
    old, new, offset = part
    known = Counter(old)
    found: set[int] = set()
    for number, line in enumerate(new, offset + 1):
        known[line] -= 1
        if known[line] < 0:
            found.add(number)
    return found


def _cut(part: _Part) -> Iterator[_Part]:
    """The parts between the longest row of lines that both have exactly once, in the same order (a patience difference).

    So that an edit at the top and one far below do not make everything between them one difference.
    """
    old, new, offset = part
    old_start = new_start = 0
    for old_at, new_at in [*_anchors(old, new), (len(old), len(new))]:
        yield _trimmed(old[old_start:old_at], new[new_start:new_at], offset + new_start)
        old_start, new_start = old_at + 1, new_at + 1


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    in_old, in_new = Counter(old), Counter(new)
    places = {line: at for at, line in enumerate(old) if in_old[line] == 1 and in_new[line] == 1}
    ends: list[int] = []  # for each length the smallest place in ``old`` that such a row ends with
    last: list[int] = []  # and its place in ``shared``
    before: list[int] = []  # for each shared line the one before it in the longest row that it ends
    shared = [(places[line], at) for at, line in enumerate(new) if line in places]
    for number, (old_at, _) in enumerate(shared):
        length = bisect.bisect_left(ends, old_at)
        before.append(last[length - 1] if length else -1)
        ends[length : length + 1] = [old_at]
        last[length : length + 1] = [number]
    row: list[tuple[int, int]] = []
    number = last[-1] if last else -1
    while number >= 0:
        row.append(shared[number])
        number = before[number]
    return row[::-1]
