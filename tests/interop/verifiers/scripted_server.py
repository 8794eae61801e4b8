"""A server of chat completions whose answers follow a script, over the threaded server that can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from policy_server import PolicyServer, says

Script = Callable[[list[dict[str, Any]]], list[dict[str, Any]] | str]
"""From the messages so far to the calls of the next answer, or its text."""


@contextmanager
def scripted(script: Script) -> Iterator[PolicyServer]:
    def reply(request: dict[str, Any]) -> dict[str, Any]:
        wanted = script(request["messages"])
        return (
            says(wanted) if isinstance(wanted, str) else {**says(""), "content": None, "tool_calls": wanted}
        )

    with PolicyServer.running(
        reply, {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    ) as server:
        yield server


def in_turn(*answers: list[dict[str, Any]] | str) -> Script:
    """The answers one after the other, by how many the conversation has already; then the last one again."""

    def play(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
        num_before = sum(message["role"] == "assistant" for message in messages)
        return answers[min(num_before, len(answers) - 1)]

    return play
