"""Does a text, or a file of a rollout's tree, show the deleted code of a task?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from composer_replication.records import Edit, Task
from composer_replication.tasks.planning.edits import Changes
from composer_replication.tasks.store import TaskStore

_NAMES_ONLY = re.compile(r"(?:[\w.]++|['\"][\w.]*+['\"]|[(),\s\\]|#[^\n]*+)*+")
"""What an import statement or an entry of ``__all__`` is made of: it tells no code."""
_EMPTY_BODIES = frozenset(
    "pass|...|return|return None|return True|return False|return self|return NotImplemented".split("|")
)


def distinctive_lines(body: str) -> list[str]:
    """The lines of a body without indentation, blank lines and comments."""
    lines = (line.strip() for line in body.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _joined(lines: Sequence[str]) -> str:
    return "\n" + "\n".join(lines) + "\n"


def copied_share(bodies: Sequence[str], files: Mapping[str, bytes]) -> tuple[float, str]:
    """Which share of the lines of some bodies stands in a tree once more, and a file that has it.

    A body counts as copied when a file holds it line for line; indentation, blank lines and comments do not hide it. One of
    a single line is not looked for: short lines repeat by nature, and neighbours are what a policy learns from.
    """
    total = copied = 0
    example = ""
    for lines in map(distinctive_lines, bodies):
        total += len(lines)
        if len(lines) < 2:
            continue
        needle, first = _joined(lines), lines[0].encode()
        copies = (path for path, data in sorted(files.items()) if first in data and needle in _plain(data))
        if path := next(copies, ""):
            copied += len(lines)
            example = example or path
    return (copied / total if total else 0.0), example


@lru_cache(maxsize=1024)
def _plain(data: bytes) -> str:
    return _joined(distinctive_lines(data.decode("utf-8", "replace")))


def golden_spans(store: TaskStore, task: Task) -> tuple[str, ...]:
    """The bodies of all deleted functions, and every other deleted span that has code in it; never shown to a policy."""
    record, golden = store.record(task.task_id), store.files(task, "golden")
    paths = {*record.changes.source_files, *(edit.path for edit in record.stub_edits)}
    texts = {path: golden.get(path, b"").decode("utf-8", "replace") for path in paths}
    return spans_of(texts, record.changes, record.stub_edits)


def spans_of(original: Mapping[str, str], changes: Changes, stub_edits: Sequence[Edit]) -> tuple[str, ...]:
    """The spans of ``golden_spans``, each once; those of ``stub_edits``, the cuts of every function inside, are bodies."""

    def cut(own: Sequence[Edit]) -> list[str]:
        return [original[edit.path][edit.start : edit.end] for edit in own]

    bodies = cut(stub_edits or changes.edits)
    removed = [original[path] for path in changes.removed_files]
    others = [*(cut(changes.edits) if stub_edits else []), *removed]
    spans = [*bodies, *(span for span in others if not _NAMES_ONLY.fullmatch(span))]
    lines = {span: " ".join(distinctive_lines(span)) for span in spans}  # each once
    # Of many functions some do nothing; their line stands in every second test.
    is_one = len(bodies) <= 1
    return tuple(span for span, text in lines.items() if text and (is_one or text not in _EMPTY_BODIES))


def shows_any(text: str, spans: Iterable[str]) -> bool:
    """Whether the lines of one of the spans stand in the text, one after the other.

    Indentation, blank lines and comments do not count. Other than in a whole tree (``copied_share``), one line is enough:
    so short a text repeats nothing by nature.
    """
    plain = _joined(distinctive_lines(text))
    return any(_joined(lines) in plain for lines in map(distinctive_lines, spans) if lines)
