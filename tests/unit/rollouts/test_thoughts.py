"""Thinking is counted from sampled ids, wherever a thought begins and whether it ends or not."""

from __future__ import annotations

import pytest
from chat_templates import FAMILIES, tokenizer_of

from composer_replication.rollouts.tokens.call_dialects import num_thinking_ids

TOKENIZER = tokenizer_of(next(family for family in FAMILIES if family.name == "qwen3"))
THOUGHT = "<think>\nIs it größer? I look.\n</think>"
CALL = '\n\n<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call><|im_end|>'


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("prompt", "pieces", "thoughts"),
    [
        ("Hello.", ["No thought at all."], []),
        ("Hello.", [THOUGHT, CALL], [0]),
        ("Hello.", ["First. ", THOUGHT, " Then. ", THOUGHT, CALL], [1, 3]),
        ("Hello. <think>\n", ["I look.\n</think>", CALL], [0]),
        ("Hello. <think>\n", ["I look, and was cut off"], [0]),
        ("Hello.", ["Well. ", "<think>\nI was cut off"], [1]),
        ("Hello. <think>\n", [], []),
    ],
)
def test_ids_of_thoughts_are_counted_and_no_others(
    prompt: str, pieces: list[str], thoughts: list[int]
) -> None:
    sampled = [ids(piece) for piece in pieces]
    joined = [number for piece in sampled for number in piece]
    assert num_thinking_ids(TOKENIZER, ids(prompt), joined) == sum(len(sampled[place]) for place in thoughts)
