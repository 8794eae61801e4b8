"""What does a chat template put after what the policy said? As ids, and never by guess.

The template renders the conversation in a short form: a stand-in takes the place of what the policy said, and a
mark that of each earlier message's content. What the rendering puts after the stand-in is the suffix: end of turn, tool
block, generation prompt. Only that is tokenised, behind the stand-in. An end of turn that the sampler has
emitted is not put again, whichever of the model's end tokens it was; one that it has not (a completion cut at its
length) is put.

Where results of tools follow, the stand-in is tried twice: as plain content, and within the arguments of a call. If
both renderings go on alike, the plain one is the rule. If they do not (a call has an end of its own, or results
continue the same turn), that of the call is, and the suffix is what stands behind the end of turn that was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from composer_replication.errors import InputError
from composer_replication.interfaces import Tokenizer
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.tokens.chat import Chat, decode, encode, first_line, render

Message = Mapping[str, Any]
_MOST_END_IDS = 2  # an end-of-turn token and the line end behind it


class Suffix(NamedTuple):
    """What is appended to the ids.

    ``marked_ids`` is what ``ids`` would be with marks in the place of contents, ``said`` the message with the stand-in (none
    before the first turn), ``rendering`` the whole conversation with marks.
    """

    ids: tuple[int, ...] = ()
    marked_ids: tuple[int, ...] = ()
    said: tuple[Message, ...] = ()
    rendering: str = ""


@dataclass(frozen=True, slots=True)
class _Tail:
    """What stands behind a stand-in: ``text``, ``marked`` the same with marks, ``head`` what is before the first mark."""

    said: Message
    text: str
    marked: str
    head: str
    rendering: str


class TemplateRule:
    """A tokenizer's chat template, asked for what it would put next in one conversation.

    Args:
        tokenizer: the policy's.
        chat: whose tools and further variables of the template are used.
    """

    def __init__(self, tokenizer: Tokenizer, chat: Chat) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._alike: set[int] = set()
        self._are_control: dict[tuple[int, ...], bool] = {}
        # up to the last completion: messages with marks, the mark right before each turn, and how it was rendered
        self._history: list[Message] = []
        self._last_marks: list[str] = []
        self._rendering = ""
        self._completion = Completion((), "", StopReason.LENGTH)

    def add_completion(self, completion: Completion, suffix: Suffix, messages: Sequence[Message]) -> None:
        """The policy answered ``messages``, of which ``suffix`` was made."""
        self._history += suffix.said
        self._history += marked_messages(messages, len(self._history))
        self._last_marks.append(self._history[-1]["content"])
        self._rendering, self._completion = suffix.rendering, completion

    def suffix(self, messages: Sequence[Message]) -> Suffix:
        """The first prompt, or what comes after the last completion."""
        if not self._last_marks:
            marked = marked_messages(messages, 0)
            text, rendering = self._render(messages), self._render(marked)
            _require_shown(rendering, marked)
            return Suffix(encode(self._tokenizer, text), encode(self._tokenizer, rendering), (), rendering)
        name = _stand_in(len(self._last_marks) - 1)
        plain, refusal = None, None
        try:
            plain = self._tail({"role": "assistant", "content": name}, name, messages)
        except InputError as error:
            refusal = error
        called = None
        num_results = sum(message.get("role") == "tool" for message in messages)
        # what was found for so many results once is the template's rule for the whole conversation
        if num_results and not (plain and num_results in self._alike):
            called = self._tail_of_calls(name, messages)
        if plain and (called is None or called.text.endswith(plain.text)):
            self._alike.add(num_results)
            ids, marked_ids = (
                self._without_end(self._behind(name, text)) for text in (plain.text, plain.marked)
            )
            return Suffix(ids, marked_ids, (plain.said,), plain.rendering)
        if called is None:
            assert refusal is not None
            raise refusal
        ids, marked_ids = (self._after_end(text, called.head) for text in (called.text, called.marked))
        return Suffix(ids, marked_ids, (called.said,), called.rendering)

    def _tail(self, said: Message, name: str, messages: Sequence[Message]) -> _Tail:
        """Render the conversation with ``said`` in the place of the last turn, and cut after ``name`` in it."""
        marked = marked_messages(messages, len(self._history) + 1)
        rendering = self._render([*self._history, said, *marked])
        behind = _after_stand_in(rendering, name)
        _require_shown(behind, marked)
        if _given(rendering, self._last_marks) != _given(self._rendering, self._last_marks):
            raise _refused(
                "changes earlier messages when further ones follow, so they cannot be appended",
                "use a template that only appends, such as TRL's training templates, or one turn an episode.",
                code="CR0812",
            )
        text = _after_stand_in(self._render([*self._history, said, *messages]), name)
        head = behind[: min(behind.find(message["content"]) for message in marked)]
        return _Tail(said, text, behind, head, rendering)

    def _tail_of_calls(self, name: str, messages: Sequence[Message]) -> _Tail | None:
        """As ``_tail``, of a turn that calls the tools which answer; None where the template takes no such turn.

        Some templates take arguments as an object, some as text.
        """
        tools = [message for message in messages if message.get("role") == "tool"]
        values = ["other"] * (len(tools) - 1) + [name]
        for as_text in (False, True):
            calls = [
                {
                    "type": "function",
                    "id": tool.get("tool_call_id", ""),
                    "function": {
                        "name": tool.get("name", "tool"),
                        "arguments": f'{{"value": "{value}"}}' if as_text else {"value": value},
                    },
                }
                for tool, value in zip(tools, values, strict=True)
            ]
            try:
                return self._tail({"role": "assistant", "content": "", "tool_calls": calls}, name, messages)
            except InputError as error:
                if error.code == "CR0812":
                    raise
        return None

    def _without_end(self, suffix: tuple[int, ...]) -> tuple[int, ...]:
        """The suffix without the end of turn that was sampled."""
        said = self._completion.token_ids
        is_finished = self._completion.stop_reason is StopReason.FINISHED
        if is_finished and said[-1:] == suffix[:1]:
            return suffix[1:]
        if self.is_control(suffix[:1]):
            for num in range(min(_MOST_END_IDS, len(suffix)), 0, -1):
                # a sampler that only stops at another token may have gone on after the end of turn
                if said[-num:] == suffix[:num] or (is_finished and said[-num - 1 : -1] == suffix[:num]):
                    return suffix[num:]
            # another end token of the model's stands for the template's: it ends a turn once
            if is_finished and self.is_control(said[-1:]):
                return suffix[1:]
        return suffix

    def _after_end(self, text: str, head: str) -> tuple[int, ...]:
        """The suffix of a turn whose calls end in a way of their own: all behind the sampled end of turn."""
        end = decode(self._tokenizer, self._completion.token_ids[-1:])
        place = head.find(end)
        is_finished = self._completion.stop_reason is StopReason.FINISHED
        if not is_finished or place < 0 or not text.startswith(head):
            how = f"ended with {end!r}" if is_finished else "was cut off"
            raise _refused(
                f"does not say how a turn goes on that {how} and is answered by a tool",
                "answer such a turn with a message of the user, or end the episode there.",
                where=f"turn {len(self._last_marks) - 1}",
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

    def is_control(self, ids: tuple[int, ...]) -> bool:
        """Whether these ids are control tokens alone: there is a text, and none without such tokens."""
        if ids not in self._are_control:
            shown = decode(self._tokenizer, ids, skip_special_tokens=True)
            self._are_control[ids] = not shown and bool(decode(self._tokenizer, ids))
        return self._are_control[ids]

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return render(self._tokenizer, self._chat, messages)
        except Exception as error:  # a template is foreign code and may raise anything
            raise unwilling_template(error) from error


def _refused(problem: str, fix: str, *, where: str = "chat template", code: str = "CR0810") -> InputError:
    return InputError(code, f"the chat template {problem}.", where=where, fix=fix)


def unwilling_template(problem: Exception) -> InputError:
    """What is said where a chat template raises (CR0810)."""
    fix = "give the tokenizer its chat template, and messages that the template takes."
    return _refused(f"does not take the conversation: {first_line(problem)}", fix, where="messages")


def marked_messages(messages: Sequence[Message], first: int) -> list[dict[str, Any]]:
    """The messages with a short mark in the place of each content, numbered from ``first``."""
    return [{**message, "content": f"message{first + idx}x"} for idx, message in enumerate(messages)]


def _stand_in(turn_idx: int) -> str:
    return f"standin{turn_idx}x"


def _after_stand_in(rendering: str, name: str) -> str:
    """What stands behind the stand-in, which is in no earlier place."""
    _, found, behind = rendering.partition(name)
    if not found:
        raise _left_out("the assistant's own turn")
    return behind


def _require_shown(rendering: str, marked: Sequence[Message]) -> None:
    for message in marked:
        if message["content"] not in rendering:
            raise _left_out(f"the message of {message.get('role')}")


def _left_out(what: str) -> InputError:
    fix = "use roles that the template shows; a tool's result may be given as a message of the user."
    return _refused(f"leaves out {what}", fix)


def _given(rendering: str, last_marks: Sequence[str]) -> list[str]:
    """What was given before each turn, from one stand-in to the last content before the next: how a template shows what the
    policy said may change later, and that alone.
    """
    place, given = 0, []
    for turn_idx, mark in enumerate(last_marks):
        end = rendering.find(mark, place) + len(mark)
        given.append(rendering[place:end])
        name = _stand_in(turn_idx)
        place = max(rendering.find(name, end), 0) + len(name)
    return given
