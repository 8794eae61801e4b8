"""A conversation as messages, and the way from text to ids and back with nothing added or cleaned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.errors import InputError
from composer_replication.interfaces import Tokenizer


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation up to the turn, as the template takes it.

    ``messages`` have ``role`` and ``content``; ``tools`` are JSON schemas; ``options`` are further
    variables of the template (``enable_thinking``, a date).
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids of a text, with nothing added."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The text of some ids, as it is."""
    return tokenizer.decode(
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def render(tokenizer: Tokenizer, chat: Chat, messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of these messages in the chat's template, generation prompt included; it may raise anything."""
    return str(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if chat.tools is None else [dict(tool) for tool in chat.tools],
            tokenize=False,
            add_generation_prompt=True,
            **chat.options,
        )
    )


def first_line(error: BaseException) -> str:
    """The first line of what a template's error says."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")[:200]


def unwilling_template(problem: Exception) -> InputError:
    """What is said where a chat template raises (CR0810)."""
    return InputError(
        "CR0810",
        f"the chat template does not take the conversation: {first_line(problem)}.",
        where="messages",
        fix="give the tokenizer its chat template, and messages that the template takes.",
    )
