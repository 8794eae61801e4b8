"""A hint in a prompt without chat turns: a comment.

A completion prompt ends where the body begins. The comment goes to its end, as the body's first lines, at
the body's indentation: it is then the last thing that the policy reads. That needs an answer which begins on a
new line; any other would run on inside the comment, so there the comment stands above the function.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from composer_replication.interfaces import Tokenizer
from composer_replication.rollouts.hints.hint_prompts import (
    LEAVE_OUT,
    HintedPrompt,
    insertion,
    refuse_control_tokens,
    unfit,
)
from composer_replication.rollouts.tokens.chat import decode, encode

WIDTH = 88
MAX_IDS_BEFORE = 2
"""Control ids that a tokenizer may put before a text."""
_HEADER = re.compile(r"^([ \t]*)(?:async[ \t]+)?(?:def|class)[ \t]", re.MULTILINE)


def comment(hint: str, indent: str = "") -> str:
    r"""The hint as whole comment lines, each indented, without a last line end.

    >>> comment("two lines\\nof it", "  ")
    '  # two lines\\n  # of it'
    """
    room = max(24, WIDTH - len(indent) - 2)
    lines = [
        piece
        for line in hint.strip().splitlines()
        for piece in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
    ]
    return "\n".join(f"{indent}# {line}" for line in lines)


def hint_code_prompt(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    prompt_text: str,
    hint: str,
    *,
    path: str,
    completion_text: str,
    indent: str,
) -> HintedPrompt:
    """Put a hint as a comment into a prompt that is the beginning of a source file.

    Args:
        tokenizer: the policy's.
        prompt_ids: the ids that the policy saw; a beginning-of-text id may stand before the text's.
        prompt_text: the text of these ids.
        hint: plain text.
        path: of the file, for errors.
        completion_text: the sampled answer; only how it begins matters.
        indent: of the body.

    Raises:
        InputError: the ids are not those of the text (CR0430); the comment fits nowhere (CR0430); no prompt
            or no hint (CR0430); the hint holds a control token (CR0430).
    """
    ids, hint = tuple(prompt_ids), hint.strip()
    if not (ids and prompt_text and hint):
        problem = "there is no prompt" if not (ids and prompt_text) else "the hint is empty"
        raise unfit(problem, fix="give turns with the ids that the policy saw and their text.")
    refuse_control_tokens(tokenizer, hint)
    plain_ids = encode(tokenizer, prompt_text)
    num_before = len(ids) - len(plain_ids)
    if not 0 <= num_before <= MAX_IDS_BEFORE or ids[num_before:] != plain_ids:
        fix = "give the prompt's text as it was tokenised for the policy."
        raise unfit("the ids of the prompt are not those of its text", path, fix)
    is_new_line = prompt_text.endswith("\n")
    if is_new_line or completion_text.startswith(("\n", "\r\n")):
        lines = comment(hint, indent)
        added = f"{lines}\n" if is_new_line else f"\n{lines}"
        hint_ids = encode(tokenizer, added)
        if decode(tokenizer, hint_ids).strip() == added.strip():
            return HintedPrompt(ids, hint_ids, len(ids), "in-body")
    found = _above(tokenizer, plain_ids, prompt_text, hint)
    if found is None:
        problem = (
            "the hint fits at no place of this prompt: the answer begins on the prompt's last line, and a "
            "comment above the function would change other ids"
        )
        raise unfit(problem, path, LEAVE_OUT)
    place, hint_ids = found
    return HintedPrompt(ids, hint_ids, place + num_before, "above-function")


def _docstring_start(text: str) -> int | None:
    """Where the string begins that the text ends with; what stands in it is no code."""
    for quote in ('"""', "'''"):
        if text.endswith(quote):
            start = text.rfind(quote, 0, len(text) - len(quote))
            return start if start >= 0 else None
    return None


def _above(
    tokenizer: Tokenizer, plain_ids: tuple[int, ...], text: str, hint: str
) -> tuple[int, tuple[int, ...]] | None:
    """Place and ids of a comment above the last function, its decorators included; None where it does not fit."""
    start = _docstring_start(text.rstrip())
    headers = list(_HEADER.finditer(text, 0, len(text) if start is None else start))
    if not headers:
        return None
    begin, indent = headers[-1].start(), headers[-1][1]
    while begin > 0:
        above = text.rfind("\n", 0, begin - 1) + 1
        if not text[above:begin].startswith(f"{indent}@"):
            break
        begin = above
    hinted = f"{text[:begin]}{comment(hint, indent)}\n{text[begin:]}"
    found = insertion(plain_ids, encode(tokenizer, hinted))
    return None if found is None else (found[1], found[2])
