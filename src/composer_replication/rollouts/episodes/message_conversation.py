"""A conversation kept as messages of text, for servers that give no token ids: evaluation only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from composer_replication.records import Completion, ToolCall, ToolResult, ToolSpec, Turn
from composer_replication.rollouts.hints.hint_prompts import Chat

CHARACTERS_PER_TOKEN = 3
"""Of ASCII: fewer than most texts have, so that a length is rather over- than underestimated. Any other character is a token."""


class TextConversation:
    """Messages of system, user and assistant; tools are described in the first, results are the user's words.

    Its turns have no ids, so nothing of it can be trained on, and ``num_tokens`` is an estimate.

    Args:
        message: the task, in the user's words.
        tools: what may be called.
        instructions: how a call has to be written, so that ``find_calls`` finds it.
    """

    def __init__(self, message: str, tools: tuple[ToolSpec, ...], *, instructions: str = "") -> None:
        listed = [
            {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
            for tool in tools
        ]
        system = (
            f"{instructions}\n\nTools:\n{json.dumps(listed, indent=1)}".strip() if tools else instructions
        )
        self._messages = [{"role": "system", "content": system}] if system else []
        self._messages.append({"role": "user", "content": message})
        self._turns: list[Turn] = []

    @property
    def num_tokens(self) -> int:
        texts = [each["content"] for each in self._messages]
        num_ascii = sum(len(text.encode("ascii", "ignore")) for text in texts)
        return num_ascii // CHARACTERS_PER_TOKEN + sum(map(len, texts)) - num_ascii

    def messages(self) -> list[Mapping[str, str]]:
        return [dict(each) for each in self._messages]

    def prompt_ids(self) -> tuple[int, ...]:
        return ()

    def add_completion(self, completion: Completion) -> None:
        self._turns.append(Turn((), completion, json.dumps(self._messages)))
        self._messages.append({"role": "assistant", "content": completion.text})

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        answers = [f"[{call.name}]\n{result.text}" for call, result in zip(calls, results, strict=True)]
        self.add_message("\n\n".join(answers))

    def add_message(self, text: str) -> None:
        if self._messages[-1]["role"] == "user":  # many servers want roles that take turns
            self._messages[-1]["content"] += f"\n\n{text}"
        else:
            self._messages.append({"role": "user", "content": text})

    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def chat(self) -> Chat | None:
        return None
