"""Teachers behind OpenAI-compatible servers: asked patiently, paid from one budget, and left out one by one when they fail."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.model_endpoint import (
    Endpoint,
    failure_reason,
    open_endpoint,
    openai_package,
)
from composer_replication.records import ToolCall
from composer_replication.traces.answer_store import AnswerStore, request_key
from composer_replication.traces.json_values import arguments_text, at, items
from composer_replication.traces.readers.messages import parts_of

_PASSING = {408, 409, 425, 429}
_ONE_REQUEST = {400, 413, 422}
"""Refusals that speak of the request and not of the server: a prompt that is too long, for example."""
_BILLED = {"200", "cut-off", "timed-out"}
"""Ends without a usable answer after which the server may have done its work."""
MAX_FAILURES = 3
"""Requests in a row without an answer, after which a teacher is left out."""
MAX_TRIES = 5
"""Times one request is sent; each has a reservation of its own, so the client's own tries are off."""
MAX_PAUSE_SECONDS = 30.0


class BudgetSpent(Exception):
    """The budget has no room for the next request; what was answered is kept."""


@dataclass(slots=True)
class Teacher:
    """A server and a model, what a million of its tokens costs, and how it does.

    ``left_out`` is the reason for which it is not asked any more.
    """

    name: str
    endpoint: Endpoint
    dollars_in: float = 0.0
    dollars_out: float = 0.0
    left_out: str = ""
    num_failures: int = 0
    counts: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class TeacherAnswer:
    """What a teacher would have done."""

    text: str
    calls: tuple[ToolCall, ...]


def open_teacher(text: str, keys: Mapping[str, str], prices: Mapping[str, tuple[float, float]]) -> Teacher:
    """A teacher from ``NAME=URL#MODEL``; ``keys`` has the variable with its key, ``prices`` dollars a million tokens.

    Raises:
        UsageError: the text is none, or its server cannot be asked like that (CR0944).
    """
    name, _, rest = text.partition("=")
    url, _, model = rest.rpartition("#")
    try:
        endpoint = open_endpoint(url, model, keys.get(name, ""))
    except UsageError as error:
        raise UsageError(
            "CR0944",
            f"a teacher cannot be asked: {error.message}",
            where=f"--teacher {text}",
            fix="--teacher NAME=http://HOST:PORT/v1#MODEL, and where it wants a key --key NAME=VARIABLE",
        ) from None
    return Teacher(name, replace(endpoint, max_retries=0), *prices.get(name, (0.0, 0.0)))


class Classroom:
    """Asks teachers, each answer once.

    Args:
        teachers: by name.
        store: of answers and charges.
        max_tokens: of an answer.
        max_concurrent: requests at a time, of each teacher.
        answer_seconds: for one answer.
        pause_seconds: before the second try; it doubles with each.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        store: AnswerStore,
        *,
        max_tokens: int = 2048,
        max_concurrent: int = 8,
        answer_seconds: float = 300.0,
        pause_seconds: float = 0.5,
    ) -> None:
        self.teachers = {teacher.name: teacher for teacher in teachers}
        self.store, self.max_tokens = store, max_tokens
        self._seconds = answer_seconds, pause_seconds
        self._limits = {name: asyncio.Semaphore(max_concurrent) for name in self.teachers}
        self._num_reserved = 0

    def request(
        self, messages: Sequence[Any], tools: Sequence[Any], *, sample: int = 0, temperature: float = 0.0
    ) -> dict[str, Any]:
        """The body of a request; ``sample`` tells further answers to the same prompt apart."""
        body: dict[str, Any] = {"messages": [_with_text(message) for message in messages]}
        if tools:
            body["tools"] = list(tools)
        how = {"max_tokens": self.max_tokens, "temperature": temperature, "seed": sample, "stream": False}
        return body | how

    def most(self, teacher: Teacher, request: Mapping[str, Any]) -> tuple[float, int]:
        """Dollars and tokens that a request can cost at most: no tokenizer makes more tokens of a prompt than it has bytes."""
        num_prompt = len(json.dumps(request, ensure_ascii=False).encode("utf-8", "replace"))
        return _dollars(teacher, num_prompt, self.max_tokens), num_prompt + self.max_tokens

    async def ask(self, name: str, request: Mapping[str, Any]) -> TeacherAnswer | None:
        """A stored answer, else one of the server; None where the teacher is left out or did not answer this.

        Raises:
            BudgetSpent: no room for the request.
        """
        teacher = self.teachers[name]
        key = request_key(teacher.endpoint.model, teacher.endpoint.url, request)
        async with self._limits[name]:
            known = self.store.answer(key)
            if known is not None:
                teacher.counts["cached"] += 1
                return read_answer(known)  # None: it was cut off, and would be again
            return None if teacher.left_out else await self._ask_server(teacher, key, request)

    async def _ask_server(
        self, teacher: Teacher, key: str, request: Mapping[str, Any]
    ) -> TeacherAnswer | None:
        most = self.most(teacher, request)
        for number in range(MAX_TRIES):
            charge = await self._reserved(key, *most)
            status, data, asked_seconds = await self._posted(teacher, key, request)
            self._num_reserved -= 1
            if status == "200" and (found := _whole(data)) is not None:
                dollars, tokens = _cost(teacher, found, most)
                self.store.settle(charge, key, found, dollars=dollars, tokens=tokens)
                answer = read_answer(found)
                teacher.counts["answered" if answer else "cut-off at --answer-tokens"] += 1
                teacher.num_failures = 0
                return answer
            self.store.give_up(charge, is_billed=status in _BILLED)
            code = int(status) if status.isdigit() else 0
            teacher.counts["not-an-answer" if code == 200 else f"http-{code}" if code else status] += 1
            if 300 <= code < 500 and code not in _PASSING:
                if code not in _ONE_REQUEST:
                    teacher.left_out = f"it refuses every request (HTTP {code})"
                return None
            if number + 1 < MAX_TRIES:
                pause = min(self._seconds[1] * 2**number, MAX_PAUSE_SECONDS)
                await asyncio.sleep(max(pause, asked_seconds))
        teacher.num_failures += 1
        if teacher.num_failures >= MAX_FAILURES and not teacher.left_out:
            teacher.left_out = f"{MAX_FAILURES} requests in a row without an answer"
        return None

    async def _posted(
        self, teacher: Teacher, key: str, request: Mapping[str, Any]
    ) -> tuple[str, bytes, float]:
        """One try: HTTP status or a reason, the body, and the seconds that the server asks for."""
        openai = openai_package()
        try:
            # The key is for the server that was named, and for no other one that it points to.
            async with (
                asyncio.timeout(self._seconds[0]),
                openai.DefaultAsyncHttpxClient(follow_redirects=False) as http,
                openai.AsyncOpenAI(http_client=http, **teacher.endpoint.client_options()) as client,
            ):
                answer = await client.chat.completions.with_raw_response.create(
                    model=teacher.endpoint.model, extra_headers={"Idempotency-Key": key}, **request
                )
                return str(answer.status_code), answer.http_response.content, 0.0
        except TimeoutError:
            return "timed-out", b"", 0.0
        except openai.APIStatusError as error:
            asked = error.response.headers.get("retry-after", "")
            return str(error.status_code), b"", float(asked) if asked.replace(".", "", 1).isdigit() else 0.0
        except openai.OpenAIError as error:
            has_begun = "Connect" not in type(error.__cause__).__name__
            reason = failure_reason(error)
            return "cut-off" if reason == "unreachable" and has_begun else reason, b"", 0.0

    async def _reserved(self, key: str, dollars: float, tokens: int) -> int:
        """A reservation; what others of this process have reserved may become free again, and is waited for."""
        while (charge := self.store.reserve(key, dollars, tokens)) is None:
            if self._num_reserved == 0:
                raise BudgetSpent
            await asyncio.sleep(0.05)
        self._num_reserved += 1
        return charge


def read_answer(body: Any) -> TeacherAnswer | None:
    """The first choice of a chat completion that ``_whole`` has taken; None where it ran out of tokens."""
    choice = items(at(body, "choices"))[0]
    if at(choice, "finish_reason") == "length":
        return None
    parts = list(parts_of({**choice["message"], "role": "assistant"}))
    text = "\n".join(part for part in parts if isinstance(part, str))
    return TeacherAnswer(text, tuple(part for part in parts if isinstance(part, ToolCall)))


def _dollars(teacher: Teacher, num_in: int, num_out: int) -> float:
    return (num_in * teacher.dollars_in + num_out * teacher.dollars_out) / 1e6


def _cost(teacher: Teacher, body: Any, most: tuple[float, int]) -> tuple[float, int]:
    """By the server's own count; by what was reserved where it gives none."""
    num_in, num_out = at(body, "usage", "prompt_tokens"), at(body, "usage", "completion_tokens")
    if not all(type(count) is int and count >= 0 for count in (num_in, num_out)):
        return most
    return _dollars(teacher, num_in, num_out), num_in + num_out


def _whole(body: bytes) -> dict[str, Any] | None:
    """The body of a whole answer: JSON with a message that says or calls something, or that ran out of tokens."""
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        has_content = bool(choice["message"].get("content") or choice["message"].get("tool_calls"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return found if has_content or choice.get("finish_reason") == "length" else None


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as text, which servers want."""
    if not message.get("tool_calls"):
        return dict(message)
    functions = [
        {**c["function"], "arguments": arguments_text(c["function"]["arguments"])}
        for c in message["tool_calls"]
    ]
    calls = [
        {**c, "function": function} for c, function in zip(message["tool_calls"], functions, strict=True)
    ]
    return {**message, "tool_calls": calls}
