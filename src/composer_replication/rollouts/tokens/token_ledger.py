"""One conversation as token ids: what was sampled stays as it was sampled, the template says what comes between.

The first prompt is the template's rendering. A completion is appended id by id and never decoded. What answers it is
appended as ``template_suffix`` finds it; each turn tokenises its own text and no other.

Sampled ids outlive what a template would make of them later: where it drops earlier thoughts, trims, or closes a
thought in the generation prompt, the ledger keeps what the policy saw and said. Whatever else would change
what stands already is refused. No control token comes out of a message's content: a file that holds ``<|im_end|>``
is shown with a space in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from composer_replication.errors import InputError
from composer_replication.interfaces import Tokenizer
from composer_replication.records import Completion, ToolCall, ToolResult
from composer_replication.rollouts.tokens.chat import Chat, decode
from composer_replication.rollouts.tokens.template_suffix import Message, Suffix, TemplateRule


class TokenLedger:
    """Keeps one conversation as ids: a prompt, then by turns a completion and what answers it.

    Args:
        tokenizer: the policy's.
        chat: system and user messages, the tools' JSON schemas, further variables of the template. Contents are
            texts.
        has_tool_messages: False puts the results of a turn into one message of the user, for templates and
            protocols without a message of tools.
        num_ids: sampled ids are those from 0 below it. A model may have rows for more ids than its tokenizer:
            then give their number. None: as many as the tokenizer has.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat: Chat, *, has_tool_messages: bool = True, num_ids: int | None = None
    ) -> None:
        self._tokenizer, self._chat, self._has_tool_messages = tokenizer, chat, has_tool_messages
        self._num_ids = len(tokenizer) if num_ids is None else num_ids
        self._rule = TemplateRule(tokenizer, chat)
        self._ids: list[int] = []
        # what stands up to the last completion
        self._messages: list[Message] = []
        self._num_kept = self._num_turns = 0
        self._completion: Completion | None = None
        # what answers it
        self._pending: list[Message] = []
        self._suffix = Suffix()
        self.add_messages(chat.messages)

    def add_completion(self, completion: Completion) -> None:
        """Append a sampled completion exactly as it is."""
        if not self._pending:
            raise ValueError("a completion follows a prompt: add the messages that answer the last one first")
        self._require_whole(completion)
        self._rule.keep(self._suffix.said, self._pending)
        self._messages += [*self._suffix.said, *self._pending]
        self._pending, self._completion = [], completion
        self._ids += completion.token_ids
        self._num_kept = len(self._ids)
        self._num_turns += 1

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append what answers the last completion (tool results, the user), and the generation prompt.

        Messages are as the template takes them: ``role``, ``content``, for a tool's result ``name`` and
        ``tool_call_id``. Several calls before the next completion count as one, since templates put the results of a
        turn into one block; the generation prompt then moves to the end. Nothing changes where it raises.

        Raises:
            InputError: the template does not take the messages (CR0810); it leaves one out (CR0810); it would
                change what stands before them (CR0812); it does not say how the turn ends (CR0810); the
                tokenizer joins what was said with what follows (CR0810); a control token in a content cannot
                be broken up (CR0816).
            ValueError: there is no message.
        """
        if not messages:
            raise ValueError("there is no message")
        pending = _joined(self._pending, messages)
        suffix = self._suffix_of(pending)
        if forged := self._forged(suffix, pending):
            pending = [{**each, "content": _broken_up(each["content"], forged)} for each in pending]
            suffix = self._suffix_of(pending)
            if self._controls(suffix.ids) != self._controls(suffix.marked_ids):
                raise InputError(
                    "CR0816",
                    "a message holds a control token of the tokenizer that cannot be broken up.",
                    where="messages",
                    fix="take the control token out of the message.",
                )
        self._pending, self._suffix = pending, suffix
        self._ids[self._num_kept :] = suffix.ids

    def add_message(self, text: str) -> None:
        """Append one message of the user; raises as ``add_messages``."""
        self.add_messages([{"role": "user", "content": text}])

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        """Append what came back: ``results[i]`` answers ``calls[i]``; raises as ``add_messages``."""
        self.add_messages(self._answers(calls, results))

    def require_results(self, call: ToolCall) -> None:
        """Refuse a template that goes on after no call: later on that would look like the policy's own fault (CR0810, CR0812)."""
        self._rule.require_way_on(self._answers([call], [ToolResult("x")]))

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def prompt_ids(self) -> tuple[int, ...]:
        """The whole conversation; after messages, what the policy continues."""
        return tuple(self._ids)

    def chat(self) -> Chat:
        """The conversation as messages, with a stand-in for what the policy said in each turn."""
        messages = (*self._messages, *(self._suffix.said if self._pending else ()), *self._pending)
        return Chat(messages, self._chat.tools, self._chat.options)

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

    def _suffix_of(self, pending: Sequence[Message]) -> Suffix:
        if self._completion is None:
            return self._rule.begin(pending)
        return self._rule.suffix(pending, self._completion)

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

    def _controls(self, ids: tuple[int, ...]) -> list[int]:
        return [token_id for token_id in ids if self._rule.is_control(token_id)]

    def _forged(self, suffix: Suffix, pending: Sequence[Message]) -> list[str]:
        """The texts of control tokens that come out of the messages' contents."""
        controls = self._controls(suffix.ids)
        if controls == self._controls(suffix.marked_ids):
            return []
        texts = {decode(self._tokenizer, (token_id,)).strip() for token_id in controls} - {""}
        # a template may also leave a part out where a content is empty
        return [text for text in texts if any(text in message["content"] for message in pending)]


def _broken_up(content: str, tokens: Iterable[str]) -> str:
    for token in tokens:
        content = content.replace(token, f"{token[0]} {token[1:]}")
    return content


def _joined(pending: Sequence[Message], messages: Sequence[Message]) -> list[Message]:
    """All messages in order; two of the user in a row become one, since many templates want roles to alternate."""
    joined = [*pending]
    for message in messages:
        if joined and pending and message.get("role") == joined[-1].get("role") == "user":
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined
