"""A conversation over one id a character, an environment that counts its lives, and policies that follow a script."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from composer_replication.errors import SandboxFailure
from composer_replication.records import (
    Completion,
    Outcome,
    Score,
    StopReason,
    ToolCall,
    ToolResult,
    ToolSpec,
    Turn,
)
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv, Judgement
from composer_replication.rollouts.episodes import agent_loop
from composer_replication.rollouts.episodes.agent_loop import EpisodeParts
from composer_replication.sandbox.process_folder import process_folder

ECHO, SUBMIT = '<echo>{"text": "hello"}</echo>', "<submit>{}</submit>"
TOOLS = (
    ToolSpec("echo", {"properties": {"text": {"type": "string"}}, "required": ["text"]}),
    ToolSpec("submit"),
    ToolSpec("work", {"properties": {"n": {"type": "integer"}}}),
)
CALL = re.compile(r"<(\w+)>(.*?)</\1>")
END = 0  # the id that ends an answer


def encode(text: str) -> tuple[int, ...]:
    return tuple(ord(character) + 1 for character in text)


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(number - 1) for number in ids if number != END)


class IdConversation:
    """The template is U:…|A:…|T:…; what was sampled is kept as it is."""

    def __init__(self, message: str, tools: tuple[ToolSpec, ...]) -> None:
        self._ids = [*encode(f"U:{message}|A:")]
        self._turns: list[Turn] = []

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    def add_completion(self, completion: Completion) -> None:
        self._turns.append(Turn(self.prompt_ids(), completion))
        self._ids += completion.token_ids

    def add_results(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> None:
        assert len(calls) == len(results)
        self._ids += encode("".join(f"|T:{result.text}" for result in results) + "|A:")

    def add_message(self, text: str) -> None:
        self._ids += encode(f"|U:{text}|A:")

    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._turns)

    def chat(self) -> None:
        return None


def find_calls(turn: Turn, tools: object = None) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name, arguments) for name, arguments in CALL.findall(turn.completion.text))


@dataclass
class IdTalk:
    """In the place of ``LedgerTalk``."""

    open: Any = IdConversation
    find_calls: Any = find_calls
    num_thinking: Any = lambda turn: 0


def say(text: str, room: int = 10**6) -> Completion:
    """An answer with its ids, cut at ``room``; log-probabilities tell the place of each id."""
    ids = (*encode(text), END)
    cut = ids[:room]
    reason = StopReason.FINISHED if len(cut) == len(ids) else StopReason.LENGTH
    return Completion(cut, decode(cut), reason, tuple(-0.5 - 0.25 * place for place in range(len(cut))))


@dataclass
class Asked:
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int

    @property
    def text(self) -> str:
        return decode(self.prompt_ids)


class ScriptedPolicy:
    """Answers with ``script(asked)``, a text, after ``pause(asked)`` if there is one."""

    def __init__(self, script: Callable[[Asked], str], pause: Callable[[Asked], Any] | None = None) -> None:
        self.script, self.pause = script, pause
        self.asked: list[Asked] = []

    async def sample(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Completion:
        asked = Asked(tuple(prompt_ids), max_new_tokens, seed)
        self.asked.append(asked)
        await asyncio.sleep(0)
        if self.pause is not None:
            await self.pause(asked)
        return say(self.script(asked), max_new_tokens)


def summarising(asked: Asked) -> str:
    """Says hello until it is asked for a summary, and submits after it."""
    if asked.text.endswith("|U:sum up|A:"):
        return "so far: hello"
    return SUBMIT if "so far" in asked.text else ECHO


@dataclass
class Lives:
    """Every environment that was ever opened."""

    opened: list[FakeEnvironment] = field(default_factory=list)

    def open(self, **how: Any) -> FakeEnvironment:
        environment = FakeEnvironment(**how)
        self.opened.append(environment)
        return environment

    def all_closed_once(self) -> bool:
        return all(each.num_closed == 1 for each in self.opened)


class FakeEnvironment:
    """Fails when two threads use it at once, or anything uses it after its end.

    ``acts`` are functions by tool name, ``fails`` says at which of reset, call and grade the sandbox breaks.
    """

    def __init__(
        self,
        acts: dict[str, Callable[[str], str]] | None = None,
        fails: Callable[[str], bool] = lambda what: False,
        pass_share: float = 1.0,
    ) -> None:
        self.acts, self.fails, self.pass_share = acts or {}, fails, pass_share
        self.num_closed = 0
        self.is_done = False
        self.calls: list[ToolCall] = []
        self._one = threading.Lock()

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return TOOLS

    def _used(self, what: str) -> None:
        assert self._one.acquire(blocking=False), "two threads at once"
        assert not self.num_closed, "used after its end"
        if self.fails(what):
            self._one.release()
            raise SandboxFailure("CR0302", f"broke at {what}.")

    def reset(self, task_id: str) -> str:
        self._used("reset")
        self._one.release()
        return f"do {task_id}"

    def call(self, call: ToolCall) -> ToolResult:
        self._used("call")
        try:
            self.calls.append(call)
            if self.is_done:
                return ToolResult("already submitted", is_error=True, fault="invalid")
            if call.name == "submit":
                self.is_done = True
                return ToolResult("submitted")
            if call.name in self.acts:
                return ToolResult(self.acts[call.name](call.arguments))
            if call.name == "echo":
                return ToolResult(json.loads(call.arguments)["text"], exit_code=0)
            return ToolResult(f"no tool {call.name}", is_error=True, fault="invalid")
        finally:
            self._one.release()

    def finish(self) -> Judgement | None:
        self._used("grade")
        self._one.release()
        if self.fails("score"):
            return None
        num_passed = round(4 * self.pass_share)
        outcomes = {f"t{n}": Outcome.PASSED if n < num_passed else Outcome.FAILED for n in range(4)}
        score = Score(outcomes, seconds=0.25)
        return Judgement(score, score.pass_share, score.pass_share)

    def close(self) -> None:
        assert self._one.acquire(blocking=False), "closed while a call runs"
        self._one.release()
        self.num_closed += 1


def ask(tools: Any, tool: str, **arguments: Any) -> ToolResult:
    """What an attempt or a toolbox answers to a call."""
    return tools.call(ToolCall(tool, json.dumps(arguments)))


def paid(env: FeatureDeletionEnv) -> float | None:
    judged = env.finish()
    return None if judged is None else judged.reward


def attempt_folders() -> set[Path]:
    return set(process_folder().glob("attempt-*"))


@contextmanager
def limits(**constants: Any) -> Iterator[None]:
    """The loop with other limits, by the names of its constants."""
    with patch.multiple(agent_loop, **constants):
        yield


def parts(policy: Any, lives: Lives, *, how: dict[str, Any] | None = None, **more: Any) -> EpisodeParts:
    return EpisodeParts(
        policy=policy, open_environment=lambda: lives.open(**(how or {})), **({"talk": IdTalk()} | more)
    )
