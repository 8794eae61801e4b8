"""Prompt, stop rule and answer of the single-turn protocol."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.config import RolloutsSection
from composer_replication.errors import InputError
from composer_replication.records import Hole
from composer_replication.rollouts.single_turn import (
    build_prompt,
    extract_answer,
    is_finished,
    refuse_leaking_prompt,
    shows_golden,
)

FILE = '''\
import os

LIMIT = 3


class Shelf:
    """Books."""

    def first(self):
        """First book."""
        return self.books[0]

    @property
    def last(self):
        """Last book."""
        raise NotImplementedError

    def count(self):
        return len(self.books)
'''
START = FILE.index('"""Last book."""') + len('"""Last book."""')
HOLE = Hole("shelf.py", START, FILE.index("NotImplementedError") + len("NotImplementedError"))


def filled(answer: str) -> str:
    return FILE[: HOLE.start] + answer + FILE[HOLE.end :]


def test_completion_prompt_ends_at_the_docstring_and_shows_the_lines_before() -> None:
    prompt = build_prompt(FILE, HOLE, RolloutsSection(context_lines=3))
    assert prompt == (
        '        """First book."""\n        return self.books[0]\n\n'
        '    @property\n    def last(self):\n        """Last book."""'
    )


def test_the_function_begins_with_its_decorators_and_not_with_a_header_in_a_docstring() -> None:
    bare = RolloutsSection(context_lines=0)
    assert build_prompt(FILE, HOLE, bare) == '    @property\n    def last(self):\n        """Last book."""'
    head = 'import os\ndef f(x):\n    """Doc.\n    def g(x):\n    """'
    hole = Hole("a.py", len(head), len(head) + 10)
    assert build_prompt(f"{head}\n    pass\n", hole, bare) == head[10:]


def test_chat_prompt_holds_the_excerpt_in_a_fence() -> None:
    prompt = build_prompt(FILE, HOLE, RolloutsSection(prompt_style="chat", context_lines=0))
    assert '```python\n    @property\n    def last(self):\n        """Last book."""\n```' in prompt


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("", False),
        ("\n        return 1", False),
        ("\n        return 1\n", False),
        ("\n        return 1\n\n", False),
        ("\n        return 1\n    d", True),
        ("\n        if x:\n            y\n        return 2\n", False),
        ("\n        return 1\nclass", True),
        ("\ndef f", True),
    ],
)
def test_is_finished(text: str, *, finished: bool) -> None:
    assert is_finished(text) is finished


def test_answer_is_cut_at_the_dedent() -> None:
    text = "\n        return self.books[-1]\n\n    def count(self):\n        return 0\n"
    answer = extract_answer(text, FILE, HOLE)
    assert answer == "\n        return self.books[-1]"
    ast.parse(filled(answer))


@pytest.mark.parametrize("text", ["\n    return 1\n", "\nreturn 1\n", "", "   ", "\n\n\n"])
def test_a_body_outside_the_function_is_no_answer(text: str) -> None:
    assert extract_answer(text, FILE, HOLE) == ""


@pytest.mark.parametrize(
    "reply",
    [
        "Sure:\n```python\nreturn self.books[-1]\n```\nDone.",
        "```\n    return self.books[-1]\n```",
        '```python\n@property\ndef last(self):\n    """Last book."""\n    return self.books[-1]\n```',
        "return self.books[-1]",
    ],
)
def test_chat_answers_are_brought_to_the_holes_indentation(reply: str) -> None:
    assert extract_answer(reply, FILE, HOLE, style="chat") == "\n        return self.books[-1]"


@given(
    st.lists(
        st.sampled_from(["return 1", "x = 2", "if y:", "    pass", "", "# note"]), min_size=1, max_size=6
    ),
    st.sampled_from(["    def next(self):", "class Other:", "x = 1"]),
)
def test_what_follows_the_body_never_reaches_the_answer(lines: list[str], after: str) -> None:
    body = "".join(f"\n        {line}" if line else "\n" for line in ["start()", *lines])
    assert extract_answer(f"{body}\n{after}\n", FILE, HOLE) == body.rstrip()


@given(st.text(max_size=80))
def test_once_finished_always_finished(text: str) -> None:
    if is_finished(text):
        assert is_finished(text + "x")


def test_a_golden_line_in_the_prompt_is_refused() -> None:
    golden, prompt = "\n        return self.books[0]", build_prompt(FILE, HOLE, RolloutsSection())
    with pytest.raises(InputError, match="CR0429"):
        refuse_leaking_prompt(prompt, golden, task_id="shelf--last")
    refuse_leaking_prompt(prompt, "\n        return self.books[-1]", task_id="shelf--last")


@pytest.mark.parametrize(
    ("prompt", "golden", "shown"),
    [
        ("def f(self):\n    return self._xyz", "\n    return self._x", False),
        ("def f(self):\n        return self._x\n", "\n    return self._x", True),
        ("a = 1\nb = 2\n", "\n    a = 1\n\n    b = 2", True),
        ("a = 1\nc = 3\nb = 2\n", "\n    a = 1\n    b = 2", False),
        ("a = 1\n", "", False),
    ],
)
def test_whole_lines_count_and_not_parts_of_lines(prompt: str, golden: str, *, shown: bool) -> None:
    assert shows_golden(prompt, golden) is shown
