"""A server of chat completions whose answers follow a script, over the threaded server that can go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

from faulty_http import FaultyHandler
from policy_server import PolicyServer

Script = Callable[[list[dict[str, Any]]], list[dict[str, Any]] | str]
"""From the messages so far to the calls of the next answer, or its text."""


class ScriptedHandler(FaultyHandler):
    def respond(self) -> None:
        request = json.loads(self.data)
        self.server.bodies.append((self.route, request))
        wanted = self.server.script(request["messages"])
        message = (
            {"role": "assistant", "content": wanted}
            if isinstance(wanted, str)
            else {"role": "assistant", "content": None, "tool_calls": wanted}
        )
        reason = "stop" if isinstance(wanted, str) else "tool_calls"
        answer = {
            "id": "answer",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
        }
        with suppress(OSError):
            self.say(200, answer)


@contextmanager
def scripted(script: Script) -> Any:
    with PolicyServer.running() as server:
        server.RequestHandlerClass = ScriptedHandler
        server.script = script
        yield server


def in_turn(*answers: list[dict[str, Any]] | str) -> Script:
    """The answers one after the other, by how many the conversation has already; then the last one again."""

    def play(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
        num_before = sum(message["role"] == "assistant" for message in messages)
        return answers[min(num_before, len(answers) - 1)]

    return play
