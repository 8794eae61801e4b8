"""A long reply is read in one pass: the characters that are passed over are counted, no time is asserted."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from composer_replication.rollouts.tokens import call_dialects
from composer_replication.rollouts.tokens.call_dialects import read_calls

MEGABYTE = 1_000_000


class Passed:
    """Stands for ``re``, for patterns and for the JSON reader; ``count`` is how many characters they went over."""

    def __init__(self) -> None:
        self.count = 0
        self._json = json.JSONDecoder()

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def compile(self, pattern: str, flags: int = 0) -> CountedPattern:
        return CountedPattern(re.compile(pattern, flags), self)

    def raw_decode(self, text: str, place: int) -> tuple[Any, int]:
        value, stop = self._json.raw_decode(text, place)
        self.count += stop - place
        return value, stop


class CountedPattern:
    def __init__(self, pattern: re.Pattern[str], passed: Passed) -> None:
        self.pattern = pattern
        self.passed = passed

    def search(self, text: str, place: int = 0) -> re.Match[str] | None:
        found = self.pattern.search(text, place)
        self.passed.count += (found.end() if found else len(text)) - place
        return found


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Passed:
    made = Passed()
    known = call_dialects.DIALECTS.items()
    counted = {name: (signs, CountedPattern(opening, made), parse) for name, (signs, opening, parse) in known}
    monkeypatch.setattr(call_dialects, "re", made)
    monkeypatch.setattr(call_dialects, "_JSON", made)
    monkeypatch.setattr(call_dialects, "DIALECTS", counted)
    return made


PIECES = [
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", </tool_call>'),
    ("hermes", "<tool_call><function=a><parameter=b>1</parameter></function></tool_call>"),
    ("llama", "<|python_tag|>x"),
    ("llama", '{"name": "a", "parameters": {"b": 1}}; '),
    ("llama", '\n{"name": '),
    ("mistral", "[TOOL_CALLS]a{"),
    ("mistral", '[TOOL_CALLS]a{"b": 1}'),
    ("deepseek", "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁calls▁end｜>"),
    ("kimi", "<|tool_call_begin|>a<|tool_call_argument_begin|>{}<|tool_calls_section_end|>"),
    ("harmony", " to=functions.a<|message|>{}<|end|>"),
    ("harmony", " to=functions.a<|message|>{}<|return|>"),
    ("fenced", "```bash\nls\n```\n"),
    ("fenced", "```json\n{}\n```\n"),
]


@pytest.mark.long
@pytest.mark.parametrize(("dialect", "piece"), PIECES)
def test_many_calls_are_read_in_one_pass(dialect: str, piece: str, passed: Passed) -> None:
    text = piece * (MEGABYTE // 4 // len(piece))
    read_calls(text, dialect)
    assert 0 < passed.count < 5 * len(text)


@pytest.mark.parametrize("item", ['{"name": "a", "arguments": {"b": 1}}', "1", '{"no": "call"}', '"a"'])
def test_each_item_of_a_list_of_calls_is_read_from_its_own_text(item: str, passed: Passed) -> None:
    num_items = MEGABYTE // 10 // len(item)
    text = f"[TOOL_CALLS] [{', '.join([item] * num_items)}]"
    calls = read_calls(text, "mistral")
    assert len(calls) == num_items
    assert sum(len(call.arguments) for call in calls) < len(text)
    assert passed.count < 6 * len(text)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("llama", "<|python_tag|>" + "a" * MEGABYTE),
        ("fenced", "`" * MEGABYTE + "\n"),
        ("fenced", "```" + "a" * MEGABYTE),
        ("fenced", ("```bash\n" + " " * 100) * 10_000),
        ("hermes", "<tool_call>" + " " * MEGABYTE),
        ("hermes", '<tool_call>{"name": "' + "a" * MEGABYTE),
        ("mistral", "[TOOL_CALLS]" + "a" * MEGABYTE),
        ("llama", ";" + " " * MEGABYTE),
    ],
)
def test_one_long_piece_ends(dialect: str, text: str) -> None:
    """A pattern that goes back at each place would not end within the suite's limit."""
    assert len(read_calls(text, dialect)) <= 1
