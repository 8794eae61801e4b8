"""Teachers behind OpenAI-compatible servers: asked patiently, paid from one budget, and left out one by one when they fail."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.records import ToolCall
from composer_replication.tasks.instructions.instruction_endpoint import (
    Endpoint,
    failure_reason,
    open_endpoint,
    openai_package,
)
from composer_replication.traces.answer_store import AnswerStore, request_key
from composer_replication.traces.trace_records import arguments_text, items, mapping, string

_PASSING = {408, 409, 425, 429}
_ONE_REQUEST = {400, 413, 422}
"""Refusals that speak of the request and not of the server: a prompt that is too long, for example."""
_BILLED = {"cut-off", "not-an-answer", "timed-out"}
"""Ends without an answer after which the server may have done its work."""
MAX_FAILURES = 3
"""Requests in a row without an answer, after which a teacher is left out."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How long one answer may take, and how often and after which pauses it is asked for again.

    Each try has a reservation of its own, so the client's own tries are off.
    """

    answer_seconds: float = 300.0
    max_tries: int = 5
    first_pause_seconds: float = 0.5
    max_pause_seconds: float = 30.0


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
    return Teacher(name, endpoint, *prices.get(name, (0.0, 0.0)))


class Classroom:
    """Asks teachers, each answer once.

    Args:
        teachers: by name.
        store: of answers and charges.
        retries: time-outs and pauses.
        max_tokens: of an answer.
        max_concurrent: requests at a time, of each teacher.
    """

    def __init__(
        self,
        teachers: Sequence[Teacher],
        store: AnswerStore,
        *,
        retries: Retries | None = None,
        max_tokens: int = 2048,
        max_concurrent: int = 8,
    ) -> None:
        self.teachers = {teacher.name: teacher for teacher in teachers}
        self.store, self.max_tokens = store, max_tokens
        self._retries = retries or Retries()
        self._limits = {name: asyncio.Semaphore(max_concurrent) for name in self.teachers}
        self._num_reserved = 0

    def request(
        self, messages: Sequence[Any], tools: Sequence[Any], *, sample: int, temperature: float
    ) -> dict[str, Any]:
        """The body of a request; ``sample`` tells further answers to the same prompt apart."""
        body: dict[str, Any] = {"messages": [_with_text(message) for message in messages]}
        if tools:
            body["tools"] = list(tools)
        return body | {
            "max_tokens": self.max_tokens,
            "temperature": temperature,
            "seed": sample,
            "stream": False,
        }

    def most(self, teacher: Teacher, request: Mapping[str, Any]) -> tuple[float, int]:
        """Dollars and tokens that a request can cost at most: no tokenizer makes more tokens of a prompt than it has bytes."""
        num_prompt = len(json.dumps(request, ensure_ascii=False).encode("utf-8", "replace"))
        dollars = (num_prompt * teacher.dollars_in + self.max_tokens * teacher.dollars_out) / 1e6
        return dollars, num_prompt + self.max_tokens

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
            if teacher.left_out:
                return None
            return await self._ask_server(teacher, key, request)

    def close(self) -> None:
        self.store.close()

    async def _ask_server(
        self, teacher: Teacher, key: str, request: Mapping[str, Any]
    ) -> TeacherAnswer | None:
        retries, dollars, tokens = self._retries, *self.most(teacher, request)
        for number in range(retries.max_tries):
            charge = await self._reserved(key, dollars, tokens)
            pause = min(retries.first_pause_seconds * 2**number, retries.max_pause_seconds)
            status, data, asked_seconds = await self._posted(teacher, key, request)
            self._num_reserved -= 1
            if status == "200" and (found := _whole(data)) is not None:
                cost = self._cost(teacher, found, dollars, tokens)
                self.store.settle(charge, key, found, dollars=cost[0], tokens=cost[1])
                answer_read = read_answer(found)
                teacher.counts["answered" if answer_read else "cut-off at --answer-tokens"] += 1
                teacher.num_failures = 0
                return answer_read
            reason = f"http-{status}" if status.isdigit() else status
            teacher.counts["not-an-answer" if status == "200" else reason] += 1
            self.store.give_up(charge, is_billed=status == "200" or status in _BILLED)
            if status.isdigit() and int(status) not in _PASSING and 300 <= int(status) < 500:
                if int(status) not in _ONE_REQUEST:
                    teacher.left_out = f"it refuses every request (HTTP {status})"
                return None
            pause = max(pause, asked_seconds)
            if number + 1 < retries.max_tries:
                await asyncio.sleep(pause)
        teacher.num_failures += 1
        if teacher.num_failures >= MAX_FAILURES and not teacher.left_out:
            teacher.left_out = f"{MAX_FAILURES} requests in a row without an answer"
        return None

    async def _posted(
        self, teacher: Teacher, key: str, request: Mapping[str, Any]
    ) -> tuple[str, bytes, float]:
        """One try: HTTP status or a reason, the body, and the seconds that the server asks for."""
        openai = openai_package()
        options = replace(teacher.endpoint, max_retries=0).client_options()
        try:
            # The key is for the server that was named, and for no other one that it points to.
            async with (
                asyncio.timeout(self._retries.answer_seconds),
                openai.DefaultAsyncHttpxClient(follow_redirects=False) as http,
                openai.AsyncOpenAI(http_client=http, **options) as client,
            ):
                answer = await client.chat.completions.with_raw_response.create(
                    model=teacher.endpoint.model, extra_headers={"Idempotency-Key": key}, **request
                )
                return str(answer.status_code), answer.http_response.content, 0.0
        except TimeoutError:
            return "timed-out", b"", 0.0
        except openai.APIStatusError as error:
            return str(error.status_code), b"", _seconds(error.response.headers.get("retry-after", ""))
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

    def _cost(
        self, teacher: Teacher, body: Mapping[str, Any], dollars: float, tokens: int
    ) -> tuple[float, int]:
        """By the server's own count; by what was reserved where it gives none."""
        usage = mapping(body.get("usage"))
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not all(type(count) is int and count >= 0 for count in counts):
            return dollars, tokens
        num_in, num_out = int(counts[0] or 0), int(counts[1] or 0)
        return (num_in * teacher.dollars_in + num_out * teacher.dollars_out) / 1e6, num_in + num_out


def _seconds(text: str) -> float:
    """What a server asks for by ``Retry-After``; 0 where it is no number."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


def read_answer(body: Any) -> TeacherAnswer | None:
    """The first choice of a chat completion that ``_whole`` has taken; None where it ran out of tokens."""
    choice = mapping(items(mapping(body).get("choices"))[0])
    if choice.get("finish_reason") == "length":
        return None
    message = mapping(choice.get("message"))
    functions = [
        (mapping(each), mapping(mapping(each).get("function"))) for each in items(message.get("tool_calls"))
    ]
    calls = tuple(
        ToolCall(string(function["name"]), arguments_text(function.get("arguments")), string(each.get("id")))
        for each, function in functions
        if string(function.get("name"))
    )
    return TeacherAnswer(string(message.get("content")), calls)


def _whole(body: bytes) -> dict[str, Any] | None:
    """The body of a whole answer: JSON with a message that says or calls something, or that ran out of tokens."""
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        message = choice["message"]
        has_content = bool(message.get("content")) or bool(message.get("tool_calls"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return found if has_content or choice.get("finish_reason") == "length" else None


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as text, which servers want."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
