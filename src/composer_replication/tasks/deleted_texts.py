"""Tests that want the very words of a deleted message, which nobody can know.

``match="slice assignment is not supported"`` asks for a text. Where the deleted code said it, and nothing in the tree of
a rollout does, whoever writes that code again words it otherwise and fails. Texts are compared by their words: one long
word, or ``_RUN`` of them in a row, so that patterns and f-strings with holes are found, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from composer_replication.tasks.syntax_trees import parsed_part
from composer_replication.tasks.test_functions import Place
from composer_replication.tasks.views import Changes

_WORD = re.compile(r"[^\W\d_]+")
_RUN = 3
_LONG_WORD = 6


Texts = frozenset[tuple[str, ...]]
"""What string constants say: their long words alone, and their words in runs; lower case."""


def deleted_texts(changes: Changes, original: Mapping[str, bytes]) -> Texts:
    """The texts of what a deletion takes out, docstrings aside."""
    lines: dict[str, set[int]] = {}
    for edit in changes.edits:
        text = original[edit.path].decode()
        first = text.count("\n", 0, edit.start) + 1
        lines.setdefault(edit.path, set()).update(
            range(first, first + text.count("\n", edit.start, edit.end) + 1)
        )
    found: Texts = frozenset()
    for path in {*lines, *changes.removed_files}:
        for line, value in _constants(original[path].decode("utf-8", "replace")):
            if path in changes.removed_files or line in lines[path]:
                found |= _runs_in(value)
    return found


def texts_asked_for(
    sources: Mapping[Place, str], texts: Texts, shown: Mapping[str, bytes]
) -> frozenset[Place]:
    """Those test functions that hold a text of the deleted code which no file shows.

    Args:
        sources: of test functions.
        texts: of the deleted code.
        shown: the tree of a rollout.
    """
    asked = {place: _runs(source) & texts for place, source in sources.items()}
    unknown = _unknown(frozenset().union(*asked.values()), shown.values())
    return frozenset(place for place, runs in asked.items() if runs & unknown)


def _unknown(runs: Texts, files: Iterable[bytes]) -> Texts:
    left = {run: re.compile(r"[\W\d_]+".join(map(re.escape, run)), re.IGNORECASE) for run in runs}
    for data in files:
        if not left:
            break
        text = data.decode("utf-8", "replace")
        left = {run: pattern for run, pattern in left.items() if not pattern.search(text)}
    return frozenset(left)


@lru_cache(maxsize=4096)
def _runs(source: str) -> Texts:
    """Of all string constants of a function."""
    return frozenset().union(*(_runs_in(value) for _, value in _constants(source)))


def _runs_in(text: str) -> Texts:
    words = [word.lower() for word in _WORD.findall(text)]
    runs = {tuple(words[at : at + _RUN]) for at in range(len(words) - _RUN + 1)}
    return frozenset(runs.union((word,) for word in words if len(word) >= _LONG_WORD))


@lru_cache(maxsize=1024)
def _constants(source: str) -> tuple[tuple[int, str], ...]:
    """The line and the value of each string of a file, or of a function cut out of a class, that is no docstring."""
    tree = parsed_part(source)
    if tree is None:
        return ()
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return tuple(
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    )
