"""Prompts with answers as token ids, tokenised apart: preference pairs, and actions that a teacher scores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from composer_replication.errors import InputError
from composer_replication.records import PreferencePair
from composer_replication.rollouts.tokens.token_ledger import Chat, Tokenizer, render

SIDES = ("prompt", "chosen", "rejected")
PairRow = dict[str, Any]


def unusable_pair(sentence: str, where: str) -> InputError:
    """The error for a pair that nothing can be learned from, or its file."""
    fix = 'one object a line: {"prompt": "…", "chosen": "…", "rejected": "…"}; composer-rl explain CR0751'
    return InputError("CR0751", f"{sentence}.", where=where, fix=fix)


def tokenised_pairs(rows: Mapping[str, PairRow], tokenizer: Tokenizer) -> tuple[PreferencePair, ...]:
    """The pairs of ``read_pair_rows`` as token ids, by the tokenizer of the model that is trained.

    Prompt and answer are tokenised apart, so that the border between them is a border of tokens. Of messages the answer
    is what the chat template writes after the prompt and its generation prompt, up to the end of the turn. Text
    gets no end of turn: write one into it where the model is to stop.

    Raises:
        InputError: a pair that the chat template does not take, or that has no ids (CR0751); messages, and the tokenizer
            has no template (CR0810).
    """
    pairs = []
    for where, row in rows.items():
        prompt, chosen, rejected = tokenised(row, SIDES, tokenizer, where)
        if chosen == rejected:
            raise unusable_pair(
                "the chosen and the rejected answer are the same once they are tokenised", where
            )
        known = (float(row.get("weight", 1.0)), str(row.get("source", "")))
        pairs.append(PreferencePair(prompt, chosen, rejected, *known))
    return tuple(pairs)


def tokenised(row: PairRow, sides: Sequence[str], tokenizer: Tokenizer, where: str) -> list[tuple[int, ...]]:
    """The ids of a prompt, the first of ``sides``, and of its answers, the others, as ``tokenised_pairs`` has them."""
    is_text = isinstance(row["prompt"], str)
    if not is_text and getattr(tokenizer, "chat_template", "") is None:
        problem = "the model has no chat template, and this pair's sides are messages."
        fix = "give prompt, chosen and rejected as texts, or take an instruction-tuned model."
        raise InputError("CR0810", problem, where=where, fix=fix)
    given = [row[side] for side in sides]
    try:
        tools = row.get("tools")
        chat = Chat(given[0], (json.loads(tools) if isinstance(tools, str) else tools) or None)
        texts = given if is_text else answers_apart(tokenizer, chat, given[1:])
    except ValueError as error:
        raise unusable_pair(str(error), where) from error
    # A template writes the tokens that begin a text itself.
    begins = [is_text, *([False] * len(texts))]
    ids = [
        tuple(tokenizer.encode(text, add_special_tokens=own))
        for text, own in zip(texts, begins, strict=False)
    ]
    if not all(ids):
        raise unusable_pair("a side of the pair has no token", where)
    return ids


def answers_apart(tokenizer: Tokenizer, chat: Chat, answers: Iterable[Sequence[Any]]) -> list[str]:
    """The text of a chat with its generation prompt, and of each answer to it what the template writes behind that.

    Raises:
        ValueError: the template writes the chat otherwise when an answer follows it, or does not take the messages.
    """
    try:
        prompt = render(tokenizer, chat, chat.messages)
        wholes = [render(tokenizer, chat, [*chat.messages, *each], is_asked=False) for each in answers]
    except Exception as error:  # whatever the template raises
        raise ValueError(f"the chat template does not take the messages: {error}") from error
    if not all(whole.startswith(prompt) for whole in wholes):
        raise ValueError("the chat template writes the prompt otherwise when an answer follows it")
    return [prompt, *(whole[len(prompt) :].rstrip("\n") for whole in wholes)]
