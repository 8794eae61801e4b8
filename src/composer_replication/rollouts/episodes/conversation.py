"""What an agent loop asks of a conversation, of whoever finds calls in an answer, and of a policy without ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from composer_replication.errors import UsageError
from composer_replication.records import Completion, ToolCall, ToolResult, ToolSpec, Turn
from composer_replication.rollouts.tokens.chat import Chat


class Conversation(Protocol):
    """One conversation, kept as the token ids that the policy saw and sampled.

    ``prompt_ids`` is what the next turn is sampled from, generation prompt included, and ``num_tokens`` its length.
    ``add_completion`` appends what was sampled, id for id, and raises an ``InputError`` for what cannot have been;
    ``add_results`` what came back (``results[i]`` answers ``calls[i]``), ``add_message`` a message of the user.
    ``turns`` are all completions with their prompts. ``chat`` is the conversation as it stands, as messages for
    hints, or None where none is kept.
    """

    @property
    def num_tokens(self) -> int: ...

    def prompt_ids(self) -> tuple[int, ...]: ...

    def add_completion(self, completion: Completion) -> None: ...

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None: ...

    def add_message(self, text: str) -> None: ...

    def turns(self) -> tuple[Turn, ...]: ...

    def chat(self) -> Chat | None: ...


class RefusedRequestError(UsageError):
    """A server refuses what it was asked as such (HTTP 400, 413): most often because it is too long for its context.

    In an episode that had an answer already it ends that episode alone (``CONTEXT``).
    """


@runtime_checkable
class QueueingPolicy(Protocol):
    """A ``TokenPolicy`` whose requests may wait for those of other episodes, and which says when it begins with one.

    ``on_begun`` is called in the event loop, at most once, and never after the request was cancelled.

    Raises:
        SandboxFailure: as ``TokenPolicy``.
    """

    async def sample_in_turn(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        on_begun: Callable[[], None],
    ) -> Completion: ...


OpenConversation = Callable[[str, tuple[ToolSpec, ...]], Conversation]
"""Begins a conversation with the first message for the policy and the tools that it may call."""

FindCalls = Callable[[Turn], tuple[ToolCall, ...]]
"""The calls in an answer, in order; its prompt says whether it began as a thought. What is meant as a call and is none is a call too, which the tools refuse."""
