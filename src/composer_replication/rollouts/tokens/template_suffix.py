"""What does a chat template put after what the policy said? As ids, and never by guess.

The template renders a small chat: the first messages and one earlier round of each kind (the roles that answered), marks in
the place of their contents, a stand-in for what the policy said, and then what answers it. What the rendering puts
after the stand-in is the suffix: end of turn, tool block, generation prompt. Only that is tokenised, behind the stand-in, so
that a turn costs its own text however long the conversation is. That the template changes nothing which stands already is
looked at once for each kind of round. An end of turn that the sampler has emitted is not put again, whichever of the model's
end tokens it was; one that it has not (a completion cut at its length) is put.

Where results of tools follow, the stand-in is tried twice: as plain content, and within the arguments of a call. If
both renderings go on alike, the plain one is the rule. If they do not (a call has an end of its own, or results
continue the same turn), that of the call is, and the suffix is what stands behind the end of turn that was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from composer_replication.errors import InputError
from composer_replication.interfaces import Tokenizer
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.tokens.chat import Chat, decode, encode, first_line, render

Message = Mapping[str, Any]
_MOST_END_IDS = 2  # an end-of-turn token and the line end behind it
# How a template opens a turn may change once it is no longer the last one (it drops thoughts): from the last mark before it on.
_OPENING = re.compile(r"(message\d+x)(?:(?!message\d).)*?(standin\d+x)", re.DOTALL)


class Suffix(NamedTuple):
    """What is appended to the ids; ``marked_ids`` is what ``ids`` would be with marks in the place of contents, ``said`` the
    message with the stand-in (none before the first turn).
    """

    ids: tuple[int, ...] = ()
    marked_ids: tuple[int, ...] = ()
    said: tuple[Message, ...] = ()


class _Tail(NamedTuple):
    """What stands behind a stand-in: ``text``, ``marked`` the same with marks, ``head`` what is before the first mark."""

    said: Message
    text: str
    marked: str
    head: str


class TemplateRule:
    """A tokenizer's chat template, asked for what it would put next in one conversation.

    ``chat`` has the tools and further variables of the template.
    """

    def __init__(self, tokenizer: Tokenizer, chat: Chat) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._history: list[
            Message
        ] = []  # with marks: the first messages, and a round of each kind that there was
        self._kinds: set[tuple[str, ...]] = set()
        self._are_control: dict[int, bool] = {}

    def begin(self, messages: Sequence[Message]) -> Suffix:
        """The first prompt."""
        marked = _marked(messages, 0)
        text, rendering = self._render(messages), self._render(marked)
        _require_shown(rendering, marked)
        self._history = marked
        return Suffix(encode(self._tokenizer, text), encode(self._tokenizer, rendering))

    def keep(self, said: Sequence[Message], messages: Sequence[Message]) -> None:
        """The policy has answered ``messages``, which followed ``said``."""
        if said and _kind(messages) not in self._kinds:
            self._kinds.add(_kind(messages))
            self._history += [*said, *_marked(messages, len(self._history) + 1)]

    def suffix(self, messages: Sequence[Message], completion: Completion) -> Suffix:
        """What comes after the last completion."""
        tail = self._tail(messages)
        if "tool_calls" in tail.said:
            ids, marked_ids = (
                self._after_end(text, tail.head, completion) for text in (tail.text, tail.marked)
            )
        else:
            behind = (self._behind(tail.said["content"], text) for text in (tail.text, tail.marked))
            ids, marked_ids = (self._without_end(each, completion) for each in behind)
        return Suffix(ids, marked_ids, (tail.said,))

    def require_way_on(self, messages: Sequence[Message]) -> None:
        """Refuse a template that never goes on with ``messages``, whichever of its control tokens ended the turn."""
        ends = tuple(filter(self.is_control, encode(self._tokenizer, self._tail(messages).head)))
        cut_off = Completion((), "", StopReason.LENGTH)
        self.suffix(messages, Completion(ends[:1], "", StopReason.FINISHED) if ends else cut_off)

    def is_control(self, token_id: int) -> bool:
        """Whether an id is a control token: it has a text, and none without such tokens."""
        if token_id not in self._are_control:
            shown = decode(self._tokenizer, (token_id,), skip_special_tokens=True)
            self._are_control[token_id] = not shown and bool(decode(self._tokenizer, (token_id,)))
        return self._are_control[token_id]

    def _tail(self, messages: Sequence[Message]) -> _Tail:
        """As the template goes on after plain words, or after a call where it does so in another way."""
        tails: list[_Tail] = []
        refusals: list[InputError] = []
        name = f"standin{len(self._history)}x"
        for said in _said(name, messages):
            try:
                tails.append(self._tail_behind(name, said, messages))
            except InputError as error:
                if error.code == "CR0812":
                    raise
                refusals.append(error)
            if tails and "tool_calls" in tails[-1].said:
                break
        if not tails:
            raise refusals[0]
        return tails[0] if tails[-1].text.endswith(tails[0].text) else tails[-1]

    def _tail_behind(self, name: str, said: Message, messages: Sequence[Message]) -> _Tail:
        """Render the small chat with ``said`` in the place of the last turn, and cut behind the stand-in in it."""
        marked = _marked(messages, len(self._history) + 1)
        rendering = self._render([*self._history, said, *marked])
        behind = _after(rendering, name)
        _require_shown(behind, marked)
        if _kind(messages) not in self._kinds:
            last = self._history[-1]["content"]
            before = _OPENING.sub(r"\1\2", self._render(self._history)).partition(last)[0]
            if not _OPENING.sub(r"\1\2", rendering).startswith(before + last):
                raise _refused(
                    "changes earlier messages when further ones follow, so they cannot be appended",
                    "use a template that only appends, such as TRL's training templates, or one turn an episode.",
                    code="CR0812",
                )
        text = _after(self._render([*self._history, said, *messages]), name)
        return _Tail(said, text, behind, behind[: min(behind.find(each["content"]) for each in marked)])

    def _without_end(self, suffix: tuple[int, ...], completion: Completion) -> tuple[int, ...]:
        """The suffix without the end of turn that was sampled."""
        said, is_finished = completion.token_ids, completion.stop_reason is StopReason.FINISHED
        if is_finished and said[-1:] == suffix[:1]:
            return suffix[1:]
        if suffix and self.is_control(suffix[0]):
            for num in range(min(_MOST_END_IDS, len(suffix)), 0, -1):
                # a sampler that only stops at another token may have gone on after the end of turn
                if said[-num:] == suffix[:num] or (is_finished and said[-num - 1 : -1] == suffix[:num]):
                    return suffix[num:]
            # another end token of the model's stands for the template's: it ends a turn once
            if is_finished and self.is_control(said[-1]):
                return suffix[1:]
        return suffix

    def _after_end(self, text: str, head: str, completion: Completion) -> tuple[int, ...]:
        """The suffix of a turn whose calls end in a way of their own: all behind the sampled end of turn."""
        end = decode(self._tokenizer, completion.token_ids[-1:])
        place = head.find(end)
        is_finished = completion.stop_reason is StopReason.FINISHED
        if not is_finished or place < 0 or not text.startswith(head):
            how = f"ended with {end!r}" if is_finished else "was cut off"
            raise _refused(
                f"does not say how a turn goes on that {how} and is answered by a tool",
                "answer such a turn with a message of the user, or end the episode there.",
            )
        return self._behind(end, text[place + len(end) :])

    def _behind(self, left: str, right: str) -> tuple[int, ...]:
        """The ids of ``right`` where it stands behind ``left``."""
        before, both = encode(self._tokenizer, left), encode(self._tokenizer, left + right)
        if both[: len(before)] != before:
            raise _refused(
                f"ends a turn with {right[:20]!r}, which the tokenizer joins with what the turn says",
                "use a template that ends a turn with a control token.",
            )
        return both[len(before) :]

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return render(self._tokenizer, self._chat, messages)
        except Exception as error:  # a template is foreign code and may raise anything
            raise unwilling_template(error) from error


def _said(name: str, messages: Sequence[Message]) -> Iterator[Message]:
    """What the policy may have said before ``messages``: words, or calls of the tools that answer."""
    yield {"role": "assistant", "content": name}
    tools = [message for message in messages if message.get("role") == "tool"]
    values = [{"value": "other"}] * (len(tools) - 1) + [{"value": name}]
    for written in (
        (dict, json.dumps) if tools else ()
    ):  # some templates take arguments as an object, some as text
        calls = [
            {
                "type": "function",
                "id": tool.get("tool_call_id", ""),
                "function": {"name": tool.get("name", "tool"), "arguments": written(value)},
            }
            for tool, value in zip(tools, values, strict=True)
        ]
        yield {"role": "assistant", "content": "", "tool_calls": calls}


def _kind(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(str(message.get("role")) for message in messages)


def _marked(messages: Sequence[Message], first: int) -> list[Message]:
    """The messages with a short mark in the place of each content, numbered from ``first``."""
    return [{**message, "content": f"message{first + idx}x"} for idx, message in enumerate(messages)]


def _after(rendering: str, name: str) -> str:
    """What stands behind the stand-in, which is in no earlier place."""
    _require_shown(rendering, [{"role": "assistant", "content": name}])
    return rendering.partition(name)[2]


def _require_shown(rendering: str, marked: Sequence[Message]) -> None:
    for message in marked:
        if message["content"] not in rendering:
            fix = "use roles that the template shows; a tool's result may be given as a message of the user."
            raise _refused(f"leaves out the message of {message.get('role')}", fix)


def _refused(problem: str, fix: str, *, where: str = "chat template", code: str = "CR0810") -> InputError:
    return InputError(code, f"the chat template {problem}.", where=where, fix=fix)


def unwilling_template(problem: Exception) -> InputError:
    """What is said where a chat template raises (CR0810)."""
    fix = "give the tokenizer its chat template, and messages that the template takes."
    return _refused(f"does not take the conversation: {first_line(problem)}", fix, where="messages")
