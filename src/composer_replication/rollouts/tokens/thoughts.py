"""Which of the sampled ids are thoughts: what stands between ``<think>`` and ``</think>``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from composer_replication.interfaces import Tokenizer
from composer_replication.rollouts.tokens.chat import decode

OPENS, CLOSES = "<think>", "</think>"
_NUM_TAIL_IDS = 16
"""So many ids at the end of a prompt hold its last mark, also where that is several ids."""


def thought_is_open(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends with ``<think>``, so that the answer begins as a thought."""
    return decode(tokenizer, prompt_ids[-_NUM_TAIL_IDS:]).rstrip().endswith(OPENS)


def num_thinking_ids(tokenizer: Tokenizer, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> int:
    """Sampled ids of thoughts, marks included; a thought without an end reaches to the end of the answer.

    An id that a mark shares with other text counts as thought.
    """
    text = decode(tokenizer, completion_ids)
    is_open = thought_is_open(tokenizer, prompt_ids)
    places = range(len(completion_ids) + 1)

    def num_characters(num_ids: int) -> int:
        return len(decode(tokenizer, completion_ids[:num_ids]))

    return sum(
        bisect_left(places, end, key=num_characters) - (bisect_right(places, start, key=num_characters) - 1)
        for start, end in _thoughts(text, is_open=is_open)
        if end > start
    )


def _thoughts(text: str, *, is_open: bool) -> Iterator[tuple[int, int]]:
    """First character of each thought, and the place after its last."""
    start = 0 if is_open else text.find(OPENS)
    while start >= 0:
        close = text.find(CLOSES, start)
        end = len(text) if close < 0 else close + len(CLOSES)
        yield start, end
        start = text.find(OPENS, end)
