"""Two prompts that differ by one hint, as token ids.

The prompt that the policy saw is copied, never tokenised again: the hinted one is the same ids with the
hint's ids put in at one place, right before the turn. Which ids, and where, the chat template says: it
renders the conversation with and without the hint, both texts are tokenised, and the first must be the
second with one run of ids put in. What the policy sampled is no part of this, so a completion has the same
ids after both prompts, and the log-probability of its token t is read at ``len(prompt) + t`` in each.

Places, tried in order: a message of its own after the last one; merged into the last message, at its end, then at
its beginning, for templates that want strictly alternating roles or close a block of tool results only at
the end. A place counts only if the template takes it, shows the hint, and changes nothing else. If none does
there is no hinted prompt.

A completion prompt ends where the body begins. There the hint is a comment, as the body's first lines: the last thing that
the policy reads. An answer that does not begin on a new line would run on inside the comment, so there a line is begun for it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_replication.errors import InputError
from composer_replication.rollouts.tokens.token_ledger import Chat, Tokenizer, decode, encode, render

SEPARATORS = ("\n\n", "\n", " ", "")
"""Between a message and the hint merged into it: the first that leaves the ids around it as they were."""
ENDINGS = ".!?:;,)`'\""
"""Taken off the end of a merged hint where no separator serves."""
WIDTH = 88
"""Of a comment, its indentation included."""
_AS_RENDERED = "give the messages, tools and template options that the prompt was rendered with."


def hint_chat_prompt(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], chat: Chat, hint: str
) -> tuple[int, ...]:
    """The ids of a prompt with a hint put before one turn of a conversation.

    Where the policy's prompt holds earlier turns as they were sampled, its ids may differ from those of the
    rendered conversation. That is as it should be, and is not looked at: only from the last message on both
    have to be equal, since nothing before it is touched.

    Args:
        tokenizer: the policy's.
        prompt_ids: the ids that the policy saw, generation prompt included.
        chat: the conversation that these ids render, of one message at least.
        hint: plain text.

    Raises:
        InputError: the prompt does not end as the template renders the conversation; the template takes the hint at no
            place; the hint holds a control token (CR0430).
    """
    ids, hint = tuple(prompt_ids), hint.strip()
    _refuse_control_tokens(tokenizer, hint)
    try:
        plain_text = render(tokenizer, chat, chat.messages)
    except Exception as error:  # a template is foreign code and may raise anything
        problem = f"the chat template does not take the turn's own conversation: {error!r}"
        raise _unfit(problem, "messages", _AS_RENDERED) from error
    plain_ids = encode(tokenizer, plain_text)
    refusals: list[str] = []
    for place, shown, messages in _places(chat.messages, hint):
        try:
            hinted_text = render(tokenizer, chat, messages)
        except Exception as error:  # noqa: BLE001  a template may raise anything; told when no other place serves
            refusals.append(f"{place}: {error!r}")
            continue
        if hinted_text.count(shown) <= plain_text.count(shown):
            refusals.append(f"{place}: the template does not show the hint as it is")
        elif (found := insertion(plain_ids, encode(tokenizer, hinted_text))) is None:
            refusals.append(f"{place}: it would change more than it adds")
        else:
            break
    else:
        problem = f"the hint fits at no place of this prompt ({'; '.join(dict.fromkeys(refusals))})"
        raise _unfit(problem, "chat template", "set strict to false to leave such turns out.")
    first, last, hint_ids = found
    num_tail = max(len(plain_ids) - first, _num_local(tokenizer, chat, plain_ids))
    if ids != plain_ids and ids[-num_tail:] != plain_ids[-num_tail:]:
        problem = f"the last {num_tail} ids of the prompt are not those of the last message and the generation prompt"
        raise _unfit(problem, "prompt_ids", _AS_RENDERED)
    start = len(ids) - (len(plain_ids) - last)
    return (*ids[:start], *hint_ids, *ids[start:])


def insertion(plain: Sequence[int], hinted: Sequence[int]) -> tuple[int, int, tuple[int, ...]] | None:
    """Where ``hinted`` is ``plain`` with one run of ids put in: first and last place, and the run at the last.

    Several places are possible when the run's end equals what stands before it; all give the same ids.
    None when there is no such run.

        >>> insertion([1, 2, 3], [1, 2, 9, 2, 3])
        (1, 2, (9, 2))
    """
    plain, hinted = tuple(plain), tuple(hinted)
    num_added = len(hinted) - len(plain)
    if num_added <= 0:
        return None
    last = _num_equal(plain, hinted)
    first = len(plain) - _num_equal(plain[::-1], hinted[::-1])
    return (first, last, hinted[last : last + num_added]) if first <= last else None


def _refuse_control_tokens(tokenizer: Tokenizer, hint: str) -> None:
    """A control token would end or begin a message."""
    ids = encode(tokenizer, hint)
    if decode(tokenizer, ids) != decode(tokenizer, ids, skip_special_tokens=True):
        fix = "put a space into it, as the function clean_text does."
        raise _unfit("the hint holds a control token of the tokenizer", hint[:60], fix)


def _places(
    messages: Sequence[Mapping[str, Any]], hint: str
) -> Iterator[tuple[str, str, list[Mapping[str, Any]]]]:
    """Name, the hint's text there, and the conversation with it."""
    yield "own-message", hint, [*messages, {"role": "user", "content": hint}]
    last = messages[-1]
    content = last.get("content")
    if last.get("role") == "assistant" or not isinstance(content, str):
        return  # what the policy said is never touched
    # Many tokenizers join a full stop and the line end after it, which then would be another id.
    for text in dict.fromkeys((hint, hint.rstrip(ENDINGS) or hint)):
        for separator in SEPARATORS:
            yield "merged", text, [*messages[:-1], {**last, "content": f"{content}{separator}{text}"}]
    for separator in SEPARATORS:
        yield "merged", hint, [*messages[:-1], {**last, "content": f"{hint}{separator}{content}"}]


def _num_local(tokenizer: Tokenizer, chat: Chat, ids: tuple[int, ...]) -> int:
    """How many ids at the end another content of the last message would change, all that follows it included; all of
    them where the template does not take another one.
    """
    num_same = len(ids)
    for stand_in in ("0", "x"):  # one of them begins otherwise than the content
        messages = [*chat.messages[:-1], {**chat.messages[-1], "content": stand_in}]
        try:
            other = encode(tokenizer, render(tokenizer, chat, messages))
        except Exception:  # noqa: BLE001  a template may raise anything: then every id is compared
            return len(ids)
        num_same = min(num_same, _num_equal(ids, other))
    return len(ids) - num_same


def _num_equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((idx for idx, (left, right) in pairs if left != right), min(len(one), len(other)))


def _unfit(problem: str, where: str, fix: str) -> InputError:
    return InputError("CR0430", f"{problem}.", where=where, fix=fix)


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
    tokenizer: Tokenizer, prompt_ids: Sequence[int], answer: str, hint: str, *, indent: str
) -> tuple[int, ...]:
    """The ids of a prompt that is the beginning of a source file and that a body follows, with a hint in it as a comment.

    ``answer`` is the text that was sampled after ``prompt_ids``, ``indent`` that of the body.
    """
    _refuse_control_tokens(tokenizer, hint)
    end = "" if answer.startswith(("\n", "\r\n")) else f"\n{indent}"
    return (*prompt_ids, *encode(tokenizer, f"\n{comment(hint, indent)}{end}"))
