"""One conversation as token ids: what was sampled stays as it was sampled, the template says what comes between.

The first prompt is the template's rendering. A completion is appended id by id and never decoded. Sampled ids outlive what a
template would make of them later: where it drops earlier thoughts, trims, or closes a thought in the generation
prompt, the ledger keeps what the policy saw and said. Whatever else would change what stands already is refused. No control
token comes out of a message's content: a file that holds ``<|im_end|>`` is shown with a space in it.

What does a chat template put after what the policy said? It renders a small chat: the first messages and one earlier round of
each kind (the roles that answered), marks in the place of their contents, a stand-in for what the policy said, and then what
answers it. What stands behind the stand-in is the suffix: end of turn, tool block, generation prompt. Only that is
tokenised, behind the stand-in, so that a turn costs its own text however long the conversation is. Where a template goes on
otherwise after a further round of a kind (it numbers them), the small chat keeps that, too. For each kind and small chat
it is looked at once whether the template leaves alone what stands already. An end of turn that the sampler has emitted is not put again,
whichever of the model's end tokens it was; one that it has not (a completion cut at its length) is put.

Where results of tools follow, the stand-in is tried twice: as plain content, and within the arguments of a call. If
both renderings go on alike, the plain one is the rule. If they do not (a call has an end of its own, or results
continue the same turn), that of the call is, and the suffix is what stands behind the end of turn that was sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from composer_replication.errors import InputError
from composer_replication.records import Completion, StopReason, ToolCall, ToolResult

Message = Mapping[str, Any]
_MOST_END_IDS = 2  # an end-of-turn token and the line end behind it
# How a template opens a turn may change once it is no longer the last one (it drops thoughts): from the last mark before it on.
_OPENING = re.compile(r"(message\d+x)(?:(?!message\d).)*?(standin\d+x)", re.DOTALL)


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers fit, and their options. Its length is how many ids it has."""

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: bool) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


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


def render(
    tokenizer: Tokenizer, chat: Chat, messages: Sequence[Mapping[str, Any]], *, is_asked: bool = True
) -> str:
    """The text of these messages in the chat's template, by default with its generation prompt; it may raise anything."""
    return str(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if chat.tools is None else [dict(tool) for tool in chat.tools],
            tokenize=False,
            add_generation_prompt=is_asked,
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


class _Tail(NamedTuple):
    """What the template writes behind a stand-in: ``text``; ``marked``, the same with marks in the place of contents; ``head``,
    what of it is before the first mark. ``said`` is the message with the stand-in, none before the first answer.
    """

    said: tuple[Message, ...] = ()
    text: str = ""
    marked: str = ""
    head: str = ""


class TokenLedger:
    """Keeps one conversation as ids: a prompt, then by turns a completion and what answers it.

    Args:
        tokenizer: the policy's.
        chat: system and user messages, the tools' JSON schemas, further variables of the template. Contents are texts.
        has_tool_messages: False puts the results of a turn into one message of the user, for templates without a message of
            tools.
        num_ids: sampled ids are those from 0 below it, for a model that has rows for more ids than its tokenizer. None: as many
            as the tokenizer has.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: Chat, *, has_tool_messages: bool = True, num_ids: int | None = None
    ) -> None:
        self._tokenizer, self._chat, self._has_tool_messages = tokenizer, chat, has_tool_messages
        self._num_ids = len(tokenizer) if num_ids is None else num_ids
        self._ids: list[int] = []
        # what stands up to the last completion
        self._messages: list[Message] = []
        self._num_kept = self._num_turns = 0
        self._completion: Completion | None = None
        # what answers it
        self._pending: list[Message] = []
        self._said: tuple[Message, ...] = ()
        self._frame = ""  # what the template writes around the messages that answer it
        self._history: list[Message] = []  # the small chat, with marks
        self._frames: dict[tuple[str, ...], str] = {}  # by the kind of a round, the newest such frame
        # kinds that were tried, each at a length of the small chat
        self._looked: set[tuple[tuple[str, ...], int]] = set()
        self._are_control: dict[int, bool] = {}
        self.add_messages(chat.messages)

    def add_completion(self, completion: Completion) -> None:
        """Append a sampled completion exactly as it is."""
        if not self._pending:
            raise ValueError("a completion follows a prompt: add the messages that answer the last one first")
        self._require_whole(completion)
        if self._said:
            kind, num_before = _kind(self._pending), len(self._history)
            if self._frames.get(kind) != self._frame:
                self._frames[kind] = self._frame
                self._history += [*self._said, *_marked(self._pending, num_before + 1)]
            self._looked.add((kind, num_before))
        self._messages += [*self._said, *self._pending]
        self._pending, self._said, self._completion = [], (), completion
        self._ids += completion.token_ids
        self._num_kept = len(self._ids)
        self._num_turns += 1

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append what answers the last completion (tool results, the user), and the generation prompt.

        Messages are as the template takes them: ``role``, ``content``, for a tool's result ``name`` and
        ``tool_call_id``. Several calls before the next completion count as one, since templates put the results of a
        turn into one block; the generation prompt then moves to the end. Nothing changes where it raises.

        Raises:
            InputError: the template does not take the messages, leaves one out or does not say how the turn ends, or the
                tokenizer joins what was said with what follows (CR0810); it would change what stands before them (CR0812); a
                control token in a content cannot be broken up (CR0816).
            ValueError: there is no message.
        """
        if not messages:
            raise ValueError("there is no message")
        pending, completion = _joined(self._pending, messages), self._completion
        tail, ids, own_controls = self._next(pending, completion)
        if forged := self._forged(ids, own_controls, pending):
            pending = [{**each, "content": _broken_up(each["content"], forged)} for each in pending]
            tail, ids, own_controls = self._next(pending, completion)
            if self._controls(ids) != own_controls:
                raise InputError(
                    "CR0816",
                    "a message holds a control token of the tokenizer that cannot be broken up.",
                    where="messages",
                    fix="take the control token out of the message.",
                )
        marked = _marked(pending, len(self._history) + 1)
        told = (re.escape(str(value)) for message in marked for value in message.values() if value)
        self._frame = re.sub("|".join(told), "_", tail.marked)
        self._pending, self._said = pending, tail.said
        self._ids[self._num_kept :] = ids

    def add_message(self, text: str) -> None:
        """Append one message of the user; raises as ``add_messages``."""
        self.add_messages([{"role": "user", "content": text}])

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Append what came back: ``results[i]`` answers ``calls[i]``; raises as ``add_messages``."""
        self.add_messages(self._answers(calls, results))

    def require_results(self, call: ToolCall) -> None:
        """Refuse a template that never goes on after a call: later it would look like the policy's fault (CR0810, CR0812)."""
        messages = self._answers([call], [ToolResult("x")])
        # whichever of its control tokens ended the turn
        ends = self._controls(encode(self._tokenizer, self._tail(messages).head))
        reason = StopReason.FINISHED if ends else StopReason.LENGTH
        self._next(messages, Completion(tuple(ends[:1]), "", reason))

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def prompt_ids(self) -> tuple[int, ...]:
        """The whole conversation; after messages, what the policy continues."""
        return tuple(self._ids)

    def chat(self) -> Chat:
        """The conversation as messages, with a stand-in for what the policy said in each turn."""
        return Chat((*self._messages, *self._said, *self._pending), self._chat.tools, self._chat.options)

    def _answers(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
        """Results as messages; a call without an id gets one of nine letters and digits, as the strictest templates want."""
        pairs = list(zip(calls, results, strict=True))
        if not self._has_tool_messages:
            return [{"role": "user", "content": "\n\n".join(result.text for _, result in pairs)}]
        return [
            {
                "role": "tool",
                "name": call.name or "unknown",
                "tool_call_id": call.call_id or f"call{idx:05d}",
                "content": result.text,
            }
            for idx, (call, result) in enumerate(pairs)
        ]

    def _require_whole(self, completion: Completion) -> None:
        ids, num_logp = completion.token_ids, len(completion.token_logp)
        wrong = [each for each in ids if not 0 <= each < self._num_ids]
        if not ids or num_logp not in (0, len(ids)):
            problem = f"has {len(ids)} sampled ids and {num_logp} log-probabilities"
            fix = "give the ids that were sampled, with one log-probability an id or none."
        elif wrong:
            problem = f"has the id {wrong[0]}, and there are those from 0 to {self._num_ids - 1}"
            fix = "sample the model that the tokenizer belongs to; num_ids tells of rows beyond the tokenizer's."
        else:
            return
        raise InputError("CR0821", f"a completion {problem}.", where=f"turn {self._num_turns}", fix=fix)

    def _next(
        self, messages: Sequence[Message], completion: Completion | None
    ) -> tuple[_Tail, tuple[int, ...], list[int]]:
        """What comes behind a completion (without one, the first prompt), its ids, and the control tokens that are the
        template's own: those with marks in the place of the contents.
        """
        if completion is None:
            marked = _marked(messages, 0)
            tail = _Tail((), self._render(messages), self._render(marked))
            _require_shown(tail.marked, marked)
            self._history = marked
            both = [encode(self._tokenizer, text) for text in (tail.text, tail.marked)]
        else:
            tail = self._tail(messages)
            without_end = self._after_end if "tool_calls" in tail.said[0] else self._without_end
            both = [without_end(tail, text, completion) for text in (tail.text, tail.marked)]
        return tail, both[0], self._controls(both[1])

    def _controls(self, ids: tuple[int, ...]) -> list[int]:
        return [token_id for token_id in ids if self._is_control(token_id)]

    def _forged(self, ids: tuple[int, ...], own_controls: list[int], pending: Sequence[Message]) -> list[str]:
        """The texts of control tokens that come out of the messages' contents."""
        controls = self._controls(ids)
        if controls == own_controls:
            return []
        texts = {decode(self._tokenizer, (token_id,)).strip() for token_id in controls} - {""}
        # a template may also leave a part out where a content is empty
        return [text for text in texts if any(text in message["content"] for message in pending)]

    def _is_control(self, token_id: int) -> bool:
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
                if error.code == "CR0812" and "tool_calls" in said:
                    raise
                refusals.append(error)
            if tails and "tool_calls" in tails[-1].said[0]:
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
        if (_kind(messages), len(self._history)) not in self._looked:
            last = self._history[-1]["content"]
            before = _OPENING.sub(r"\1\2", self._render(self._history)).partition(last)[0]
            if not _OPENING.sub(r"\1\2", rendering).startswith(before + last):
                raise _refused(
                    "changes earlier messages when further ones follow, so they cannot be appended",
                    "use a template that only appends, such as TRL's training templates, or one turn an episode.",
                    code="CR0812",
                )
        text = _after(self._render([*self._history, said, *messages]), name)
        return _Tail((said,), text, behind, behind[: min(behind.find(each["content"]) for each in marked)])

    def _without_end(self, tail: _Tail, text: str, completion: Completion) -> tuple[int, ...]:
        """The suffix without the end of turn that was sampled."""
        suffix = self._behind(tail.said[0]["content"], text)
        said, is_finished = completion.token_ids, completion.stop_reason is StopReason.FINISHED
        if is_finished and said[-1:] == suffix[:1]:
            return suffix[1:]
        if suffix and self._is_control(suffix[0]):
            for num in range(min(_MOST_END_IDS, len(suffix)), 0, -1):
                # a sampler that stops at another token only may have gone on after the end of turn
                if said[-num:] == suffix[:num] or (is_finished and said[-num - 1 : -1] == suffix[:num]):
                    return suffix[num:]
            # another end token of the model's stands for the template's: it ends a turn once
            if is_finished and self._is_control(said[-1]):
                return suffix[1:]
        return suffix

    def _after_end(self, tail: _Tail, text: str, completion: Completion) -> tuple[int, ...]:
        """The suffix of a turn whose calls end in a way of their own: all behind the sampled end of turn."""
        end = decode(self._tokenizer, completion.token_ids[-1:])
        place = tail.head.find(end)
        is_finished = completion.stop_reason is StopReason.FINISHED
        if not is_finished or place < 0 or not text.startswith(tail.head):
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


def _broken_up(content: str, tokens: Iterable[str]) -> str:
    for token in tokens:
        content = content.replace(token, f"{token[0]} {token[1:]}")
    return content


def _joined(pending: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """All messages in order; two of the user in a row become one, since many templates want roles to alternate."""
    joined = [*pending]
    for message in messages:
        if pending and message.get("role") == joined[-1].get("role") == "user":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _said(name: str, messages: Sequence[Message]) -> Iterator[Message]:
    """What the policy may have said before ``messages``: words, or calls of the tools that answer."""
    yield {"role": "assistant", "content": name}
    tools = [message for message in messages if message.get("role") == "tool"]
    values = [{"value": "other"}] * (len(tools) - 1) + [{"value": name}]
    # some templates take arguments as an object, some as text
    for written in (dict, json.dumps) if tools else ():
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


def _refused(problem: str, fix: str, code: str = "CR0810") -> InputError:
    return InputError(code, f"the chat template {problem}.", where="chat template", fix=fix)
