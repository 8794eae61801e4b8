"""What a split compares of each task: ids, hashes and names in one spelling, and sets of hashes.

Copies are found by one hash over all files, near-copies by what makes a task that task: its golden
code with other golden code, and its own tests with other tasks' own tests. Whole trees are not
compared that way: two tasks of one repository share nearly all of theirs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.safety.code_tokens import (
    Line,
    line_words,
    logical_lines,
    normalised_text,
    num_words,
)

SHINGLE_TOKENS = 5
MIN_SHINGLES = 12
MIN_LINE_WORDS = 2
_PYTHON = (".py", ".pyi")
_PARTS = ("broken_tree", "tests", "golden", "own_tests")


class SplitRequestError(UsageError, ValueError):
    """The items or the request cannot make a split (CR0503)."""

    def __init__(self, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__("CR0503", message, where=where, fix=fix)


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """What is kept of a task; None was not given or not looked at. No code and no test text is in it.

    ``repository`` is the name without its version, ``symbol`` the dotted name of the deleted definition
    in its module, both in one spelling; ``has_golden`` says whether golden code was compared.
    """

    task_id: str
    content_sha256: str | None = None
    repository: str | None = None
    symbol: str | None = None
    has_golden: bool = False


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A task as it is compared; what is empty was not given, or says too little.

    Shapes are shingles. ``golden_lines`` has the number of words of each line of the golden code.
    """

    entry: Entry
    golden_shapes: frozenset[int] = frozenset()
    golden_lines: Mapping[int, int] = field(default_factory=dict)
    golden_code: int | None = None
    test_shapes: frozenset[int] = frozenset()


class TaskReader:
    """Reads tasks; one reader for both sides of a split, so that a text that many share is read once.

    With ``check_content`` off only ids and names are looked at.
    """

    def __init__(self, *, check_content: bool) -> None:
        self._check_content = check_content
        self._file_sha256 = cache(_file_sha256)
        self._shapes_of_text = cache(lambda text: shingles(_shape(logical_lines(text))))
        # The same object for the same texts: a repository's tests are kept once, not once a task.
        self._shapes = cache(lambda texts: _enough(frozenset().union(*map(self._shapes_of_text, texts))))

    def read(self, items: Iterable[Any], side: str) -> list[ReadTask]:
        """Tasks in the order of their ids; an item that is listed twice counts once.

        A SplitRequestError says what is no task, has no text, or shares its id with another task.
        """
        if isinstance(items, str):
            raise SplitRequestError("one text is not a list of tasks.", where=side, fix=f"pass [{items!r}].")
        tasks: dict[str, ReadTask] = {}
        for position, item in enumerate(items):
            task = self._read_one(item, f"{side}[{position}]")
            task_id = task.entry.task_id
            if tasks.setdefault(task_id, task) != task:
                wrong = f"two different tasks have the id {task_id!r}."
                raise SplitRequestError(wrong, where=side, fix="give each task its own id.")
        return [tasks[task_id] for task_id in sorted(tasks)]

    def _read_one(self, item: Any, where: str) -> ReadTask:
        task_id = item if isinstance(item, str) else getattr(item, "task_id", None)
        if not isinstance(task_id, str) or not task_id:
            wrong = f"{type(item).__name__} is not a task."
            raise SplitRequestError(wrong, where=where, fix="pass task ids, or objects with a task_id.")
        names = (
            repository_name(getattr(item, "repository", None)),
            qualified_name(getattr(item, "symbol", None)),
        )
        if not self._check_content or isinstance(item, str):
            return ReadTask(Entry(task_id, None, *names))
        try:
            tree, tests, golden, own_tests = (_texts_of(getattr(item, part, None)) for part in _PARTS)
        except TypeError as error:
            wrong = f"the content of {task_id!r} cannot be read: {error}."
            raise SplitRequestError(wrong, where=where) from error
        lines = logical_lines("\n".join(_python(golden)))
        exact = [line_words(line, blind=False) for line in lines]
        weights = {_hash(words): num_words(line) for words, line in zip(exact, lines, strict=True)}
        # What stands in for own tests and golden is compared between repositories only: within one it is shared.
        shared = (_python(own_tests) or _python(tests)) + ([] if lines else _python(tree))
        return ReadTask(
            Entry(task_id, self._content_sha256(tree, tests, golden), *names, bool(lines)),
            golden_shapes=_enough(shingles(_shape(lines))),
            golden_lines={line: words for line, words in weights.items() if words >= MIN_LINE_WORDS},
            golden_code=_hash(word for words in exact for word in (*words, "\n")) if lines else None,
            test_shapes=self._shapes(frozenset(shared)),
        )

    def _content_sha256(self, tree: Mapping[str, str], *others: Mapping[str, str]) -> str | None:
        """sha256 hex over the parts, blind to file names, file order, empty files and second copies."""
        if not tree and not others[-1]:
            return None  # tests alone: a bare record of a task, with no content to look at
        parts = [
            sorted({self._file_sha256(text, path.endswith(_PYTHON)) for path, text in part.items()} - {""})
            for part in (tree, *others)
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest() if any(parts) else None


def repository_name(repository: object) -> str | None:
    """``https://host/org/Foo_Bar.git``, ``Foo_Bar==1.2`` and ``foo.bar`` are all ``foo-bar``."""
    name = re.split(r"==|@", str(repository or ""), maxsplit=1)[0].strip().rstrip("/")
    name = re.split(r"[/\\:]", name)[-1].removesuffix(".git")
    return re.sub(r"[-_.]+", "-", name).lower() or None


def qualified_name(symbol: object) -> str | None:
    """``src/pkg/api.py::Class.f``, ``pkg.api:Class.f`` and ``pkg.api.Class.f`` are all ``Class.f``.

    Without a file, two or more lower-case parts before the others count as modules.
    """
    text = str(symbol or "").strip()
    in_file = re.fullmatch(r".*\.pyi?::?(.+)", text)
    parts = [part for part in re.split(r"[.:\s]+", in_file[1] if in_file else text) if part]
    num_lower = next((n for n, part in enumerate(parts[:-1]) if not part.islower()), len(parts) - 1)
    return ".".join(parts if in_file or num_lower < 2 else parts[num_lower:]) or None


def shingles(words: Iterable[str], num_tokens: int = SHINGLE_TOKENS) -> frozenset[int]:
    """Hashes of all runs of so many words."""
    listed = list(words)
    starts = range(len(listed) - num_tokens + 1)
    return frozenset(_hash(listed[start : start + num_tokens]) for start in starts)


def _texts_of(part: object) -> dict[str, str]:
    """A part of a task as text by path; a text, or each of a list, is Python code."""
    listed = [part] if isinstance(part, str) else part or {}
    if isinstance(listed, list | tuple):
        listed = {f"{position:06}.py": text for position, text in enumerate(listed)}
    if not isinstance(listed, Mapping) or not all(isinstance(text, str) for text in listed.values()):
        raise TypeError(f"expected text, or a mapping from path to text, got {type(part).__name__}")
    return {str(path): listed[path] for path in sorted(listed, key=str)}


def _python(texts: Mapping[str, str]) -> list[str]:
    return [text for path, text in texts.items() if path.endswith(_PYTHON) and text.strip()]


def _file_sha256(text: str, is_python: bool) -> str:  # noqa: FBT001  a key of the cache
    normalised = normalised_text(text, is_python=is_python)
    return hashlib.sha256(normalised.encode(errors="surrogatepass")).hexdigest() if normalised else ""


def _shape(lines: Iterable[Line]) -> Iterable[str]:
    return (word for line in lines for word in line_words(line, blind=True))


def _enough(shapes: frozenset[int]) -> frozenset[int]:
    return shapes if len(shapes) >= MIN_SHINGLES else frozenset()


def _hash(words: Iterable[str]) -> int:
    """64 bits that are the same in every process, unlike ``hash``."""
    text = "\x1f".join(words).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
