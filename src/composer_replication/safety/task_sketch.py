"""What two tasks are compared by when they are no exact copies: sets of hashes.

Compared is what makes a task that task: its golden code with other golden code, and its
own tests with other tasks' own tests. Whole trees are not: two tasks of one repository
share nearly all of theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_replication.safety.code_tokens import exact_words, logical_lines, num_words, shape_words

SHINGLE_TOKENS = 5
MIN_SHINGLES = 12
NEAR_DUPLICATE_PERCENT = 60
MIN_LINE_WORDS = 2
MIN_SHARED_WORDS = 8
SHARED_WORDS_PERCENT = 50
MIN_SAME_CODE_WORDS = 5


@dataclass(frozen=True, slots=True)
class Sketch:
    """Hashes of one task; what is empty was not given, or says too little to be compared.

    Attributes:
        golden_shapes: shingles of the golden code, for ``NEAR_DUPLICATE_PERCENT``.
        golden_lines: lines of the golden code with the number of words that each has.
        golden_code: the golden code as a whole, None where there is none.
        test_shapes: shingles of the task's own tests.
    """

    golden_shapes: frozenset[int] = frozenset()
    golden_lines: Mapping[int, int] = field(default_factory=dict)
    golden_code: int | None = None
    test_shapes: frozenset[int] = frozenset()

    @property
    def num_golden_words(self) -> int:
        return sum(self.golden_lines.values())


class SketchReader:
    """Makes sketches; a text that many tasks share is read once."""

    def __init__(self) -> None:
        self._by_text: dict[bytes, frozenset[int]] = {}
        self._by_texts: dict[frozenset[bytes], frozenset[int]] = {}

    def of_task(self, item: Any) -> Sketch:
        """Sketch of an item's ``golden`` and ``own_tests``.

        Without ``own_tests`` the Python files of ``tests`` stand in for them, and without a
        golden those of ``broken_tree`` join them: such an item is compared only with tasks
        of other repositories, since within one these are shared.

        Raises:
            TypeError: a part is neither text, nor texts, nor a mapping from path to text.
        """
        golden = "\n".join(python_texts(getattr(item, "golden", None)))
        lines = logical_lines(golden)
        shared = python_texts(getattr(item, "own_tests", None)) or python_texts(getattr(item, "tests", None))
        if not lines:
            shared = [*shared, *python_texts(getattr(item, "broken_tree", None))]
        test_shapes = self._shapes_of_texts(shared)
        if not lines:
            return Sketch(test_shapes=test_shapes)
        exact = [exact_words(line) for line in lines]
        weights = {_hash(words): num_words(line) for words, line in zip(exact, lines, strict=True)}
        return Sketch(
            golden_shapes=_enough(shingles(word for line in lines for word in shape_words(line))),
            golden_lines={key: words for key, words in weights.items() if words >= MIN_LINE_WORDS},
            golden_code=_hash(word for line in exact for word in (*line, "\n")),
            test_shapes=test_shapes,
        )

    def _shapes_of_texts(self, texts: Iterable[str]) -> frozenset[int]:
        """The same object for the same texts: a repository's tests are kept once, not once a task."""
        by_key = {hashlib.sha256(_encoded(text)).digest(): text for text in texts}
        key = frozenset(by_key)
        if key not in self._by_texts:
            for name, text in by_key.items():
                if name not in self._by_text:
                    words = (word for line in logical_lines(text) for word in shape_words(line))
                    self._by_text[name] = shingles(words)
            self._by_texts[key] = _enough(frozenset().union(*(self._by_text[name] for name in by_key)))
        return self._by_texts[key]


def python_texts(part: object) -> list[str]:
    """The Python texts of a part of a task: of a text or list all, of a mapping the ``.py`` files.

    Raises:
        TypeError: neither text, nor texts, nor a mapping from path to text.
    """
    if part is None:
        return []
    if isinstance(part, str):
        texts: list[Any] = [part]
    elif isinstance(part, Mapping):
        texts = [part[path] for path in sorted(part, key=str) if str(path).endswith((".py", ".pyi"))]
    elif isinstance(part, list | tuple):
        texts = list(part)
    else:
        raise TypeError(f"expected text, or a mapping from path to text, got {type(part).__name__}")
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"expected text, got {type(text).__name__}")
    return [text for text in texts if text.strip()]


def shingles(words: Iterable[str], num_tokens: int = SHINGLE_TOKENS) -> frozenset[int]:
    """Hashes of all runs of so many words."""
    listed = list(words)
    starts = range(len(listed) - num_tokens + 1)
    return frozenset(_hash(listed[start : start + num_tokens]) for start in starts)


def _enough(shapes: frozenset[int]) -> frozenset[int]:
    return shapes if len(shapes) >= MIN_SHINGLES else frozenset()


def _hash(words: Iterable[str]) -> int:
    """64 bits that are the same in every process, unlike ``hash``."""
    return int.from_bytes(hashlib.blake2b(_encoded("\x1f".join(words)), digest_size=8).digest(), "big")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
