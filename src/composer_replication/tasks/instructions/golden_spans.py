"""The deleted code of a task, span by span: for searching texts that somebody will see, and for nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from composer_replication.records import Edit, Task
from composer_replication.tasks.leaks.copies import distinctive_lines
from composer_replication.tasks.store import TaskStore

_NAMES_ONLY = re.compile(r"(?:[\w.]++|['\"][\w.]*+['\"]|[(),\s\\]|#[^\n]*+)*+")
"""What an import statement or an entry of ``__all__`` is made of: it tells no code."""
_EMPTY_BODIES = frozenset(
    {
        "pass",
        "...",
        "return",
        "return None",
        "return True",
        "return False",
        "return self",
        "return NotImplemented",
    }
)


def golden_spans(store: TaskStore, task: Task) -> tuple[str, ...]:
    """The bodies of all deleted functions, and every other deleted span that has code in it.

    Never to be shown to a policy.

    Raises:
        InputError: the store is damaged (CR0411).
    """
    record = store.record(task.task_id)
    paths = {*(edit.path for edit in (*record.edits, *record.stub_edits)), *record.removed_files}
    golden = store.files(task, "golden")
    texts = {path: golden.get(path, b"").decode("utf-8", "replace") for path in sorted(paths)}
    return spans_of(texts, record.edits, record.stub_edits, record.removed_files)


def spans_of(
    original: Mapping[str, str],
    edits: Sequence[Edit],
    stub_edits: Sequence[Edit],
    removed_files: Sequence[str],
) -> tuple[str, ...]:
    """The spans of ``golden_spans``, each once.

    Args:
        original: text of each file that is named by the others, by path.
        edits: what takes the code out.
        stub_edits: the cuts of every function inside; their spans are bodies.
        removed_files: paths of files that are gone.
    """
    bodies = [original[edit.path][edit.start : edit.end] for edit in stub_edits or edits]
    others = [
        *(original[edit.path][edit.start : edit.end] for edit in edits if stub_edits),
        *(original[path] for path in removed_files),
    ]
    others = [span for span in others if not _NAMES_ONLY.fullmatch(span)]
    spans = [span for span in (*bodies, *others) if distinctive_lines(span)]
    if len(bodies) > 1:  # of many functions some do nothing; their line stands in every second test
        spans = [span for span in spans if " ".join(distinctive_lines(span)) not in _EMPTY_BODIES]
    return tuple(dict.fromkeys(spans))


def shows_body(text: str, golden_body: str) -> bool:
    """Whether the body's lines stand in the text, one after the other.

    Indentation, blank lines and comments do not count. Other than in a whole tree
    (``leaks.find_copy``), one line is enough: so short a text repeats nothing by nature.
    """
    lines = distinctive_lines(golden_body)
    needle = "\n" + "\n".join(lines) + "\n"
    return bool(lines) and needle in "\n" + "\n".join(distinctive_lines(text)) + "\n"


def shows_any(text: str, spans: Iterable[str]) -> bool:
    """Whether the text shows one of the spans."""
    return any(shows_body(text, span) for span in spans)
