"""Teachers behind OpenAI-compatible servers: asked patiently, paid from one budget, and left out one by one when they fail.

Answers are kept in SQLite, by the content of the request. What a request may cost at most is set aside before it is sent, by one
statement with the check against the budget. It counts as spent until it is settled or freed, also when nobody saw its end (a
process that was killed): spending never passes the budget.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from composer_replication.errors import UsageError
from composer_replication.model_endpoint import Endpoint, failure_reason, open_endpoint, openai_package
from composer_replication.records import ToolCall
from composer_replication.traces.json_values import at, json_text, typed
from composer_replication.traces.prompts import Message, assistant_message
from composer_replication.traces.readers.messages import parts_of
from composer_replication.traces.trace_records import Dropped

_TABLES = """
CREATE TABLE IF NOT EXISTS messages (key TEXT PRIMARY KEY, answer TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS charges (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL, dollars REAL NOT NULL, tokens INTEGER NOT NULL, state TEXT NOT NULL
);
CREATE VIEW IF NOT EXISTS spent AS
    SELECT COALESCE(SUM(dollars), 0.0) AS dollars, COALESCE(SUM(tokens), 0) AS tokens FROM charges;
"""
_RESERVE = """
INSERT INTO charges (key, dollars, tokens, state)
SELECT :key, :dollars, :tokens, 'reserved' FROM spent
WHERE spent.dollars + :dollars <= :max_dollars AND spent.tokens + :tokens <= :max_tokens
"""


class Answer(NamedTuple):
    """What a teacher said; the message is None where it ran out of tokens, and would again."""

    message: Message | None
    num_prompt: int | None = None
    num_completion: int | None = None


class AnswerStore:
    """One file of answers and charges, made where there is none; the budget holds over its whole life."""

    def __init__(self, path: Path, *, max_dollars: float, max_tokens: int) -> None:
        self._limits = {"max_dollars": max_dollars, "max_tokens": max_tokens}
        self._database = sqlite3.connect(path, isolation_level=None, timeout=60.0)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_TABLES)

    def answer(self, key: str) -> Answer | None:
        """The stored answer, None where there is none."""
        row = self._database.execute("SELECT answer FROM messages WHERE key = ?", (key,)).fetchone()
        return None if row is None else Answer(json.loads(row[0]))

    def spent(self) -> tuple[float, int]:
        """Dollars and tokens, what is set aside included."""
        dollars, tokens = self._database.execute("SELECT dollars, tokens FROM spent").fetchone()
        return float(dollars), int(tokens)

    def reserve(self, key: str, dollars: float, tokens: int) -> int | None:
        """Set aside what a request may cost at most; None where the budget does not have it any more."""
        values = {"key": key, "dollars": dollars, "tokens": tokens, **self._limits}
        made = self._database.execute(_RESERVE, values)
        return made.lastrowid if made.rowcount else None

    def settle(self, charge: int, key: str, answer: Answer, dollars: float, tokens: int) -> None:
        """Keep an answer, and then what it did cost in the place of what was set aside."""
        text = json.dumps(answer.message, ensure_ascii=False)
        self._database.execute("INSERT OR IGNORE INTO messages VALUES (?, ?)", (key, text))
        change = "UPDATE charges SET dollars = ?, tokens = ?, state = 'paid' WHERE id = ?"
        self._database.execute(change, (dollars, tokens, charge))

    def free(self, charge: int) -> None:
        """A request that the server did not work on costs nothing."""
        self._database.execute("DELETE FROM charges WHERE id = ?", (charge,))

    def close(self) -> None:
        self._database.close()


_PASSING = {"http-408", "http-409", "http-425", "http-429"}
_ONE_REQUEST = {"http-400", "http-413", "http-422"}
"""Refusals that speak of the request and not of the server: a prompt that is too long, for example."""
_BILLED = {"not-an-answer", "cut-off", "timed-out"}
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

    def dollars(self, num_in: int, num_out: int) -> float:
        """What so many tokens of a prompt and of an answer cost."""
        return (num_in * self.dollars_in + num_out * self.dollars_out) / 1e6

    @property
    def num_answered(self) -> int:
        """Whole answers, those that ran out of tokens among them."""
        return sum(self.counts[what] for what in ("answered", "cached", _RAN_OUT))


_RAN_OUT = "cut-off at --answer-tokens"


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
        problem = f"a teacher cannot be asked: {error.message}"
        fix = "--teacher NAME=http://HOST:PORT/v1#MODEL, and where it wants a key --key NAME=VARIABLE"
        raise UsageError("CR0944", problem, where=f"--teacher {text}", fix=fix) from None
    return Teacher(name, replace(endpoint, max_retries=0), *prices.get(name, (0.0, 0.0)))


class Classroom:
    """Asks teachers, each answer once: at most ``max_tokens`` long, ``max_concurrent`` at a time of each teacher.

    ``pause_seconds`` stand before the second try of a request; they double with each.
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
        self._answer_seconds, self._pause_seconds = answer_seconds, pause_seconds
        self._limits = {name: asyncio.Semaphore(max_concurrent) for name in self.teachers}
        self._num_reserved = 0

    def request(
        self, messages: Sequence[Message], tools: Sequence[Any], *, sample: int = 0, temperature: float = 0.0
    ) -> dict[str, Any]:
        """The body of a request; ``sample`` tells further answers to the same prompt apart."""
        how = {"max_tokens": self.max_tokens, "temperature": temperature, "seed": sample, "stream": False}
        offered = {"tools": list(tools)} if tools else {}
        return {"messages": [_with_text(message) for message in messages], **offered, **how}

    def most(self, teacher: Teacher, request: Mapping[str, Any]) -> tuple[float, int]:
        """Dollars and tokens that a request can cost at most: no tokenizer makes more tokens of a prompt than it has bytes."""
        num_prompt = len(json.dumps(request, ensure_ascii=False).encode("utf-8", "replace"))
        return teacher.dollars(num_prompt, self.max_tokens), num_prompt + self.max_tokens

    async def ask(self, name: str, request: Mapping[str, Any]) -> Message | None:
        """A stored answer, else one of the server; None where the teacher is left out or did not answer this.

        Raises:
            BudgetSpent: no room for the request.
        """
        teacher = self.teachers[name]
        named = [teacher.endpoint.url, teacher.endpoint.model, request]
        whole = json.dumps(named, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
        key = hashlib.sha256(whole).hexdigest()
        async with self._limits[name]:
            if (found := self.store.answer(key)) is not None:
                teacher.counts["cached"] += 1
            elif not teacher.left_out and (found := await self._bought(teacher, key, request)) is not None:
                teacher.counts["answered" if found.message else _RAN_OUT] += 1
        return None if found is None else found.message

    async def _bought(self, teacher: Teacher, key: str, request: Mapping[str, Any]) -> Answer | None:
        """An answer of the server, which is stored; None where there is none."""
        most = self.most(teacher, request)
        for number in range(MAX_TRIES):
            # what others of this process have reserved may become free again, and is waited for
            while (charge := self.store.reserve(key, *most)) is None:
                if self._num_reserved == 0:
                    raise BudgetSpent
                await asyncio.sleep(0.05)
            self._num_reserved += 1
            answer, reason, asked_seconds = await self._posted(teacher, key, request)
            self._num_reserved -= 1
            if answer is not None:
                cost = most  # where the server does not count
                if answer.num_prompt is not None and answer.num_completion is not None:
                    num_tokens = (answer.num_prompt, answer.num_completion)
                    cost = (teacher.dollars(*num_tokens), sum(num_tokens))
                self.store.settle(charge, key, answer, *cost)
                teacher.num_failures = 0
                return answer
            if reason not in _BILLED:
                self.store.free(charge)
            teacher.counts[reason] += 1
            if reason in _ONE_REQUEST:
                return None
            if reason.startswith(("http-3", "http-4")) and reason not in _PASSING:
                teacher.left_out = f"it refuses every request ({reason})"
                return None
            if number + 1 < MAX_TRIES:
                pause = min(self._pause_seconds * 2**number, MAX_PAUSE_SECONDS)
                await asyncio.sleep(max(pause, asked_seconds))
        teacher.num_failures += 1
        if teacher.num_failures >= MAX_FAILURES and not teacher.left_out:
            teacher.left_out = f"{MAX_FAILURES} requests in a row without an answer"
        return None

    async def _posted(
        self, teacher: Teacher, key: str, request: Mapping[str, Any]
    ) -> tuple[Answer | None, str, float]:
        """One try: an answer, or None, the reason and the seconds that the server asks to wait."""
        openai = openai_package()
        try:
            # The key is for the server that was named, and for no other one that it points to.
            async with (
                asyncio.timeout(self._answer_seconds),
                openai.DefaultAsyncHttpxClient(follow_redirects=False) as http,
                openai.AsyncOpenAI(http_client=http, **teacher.endpoint.client_options()) as client,
            ):
                answer = await client.chat.completions.with_raw_response.create(
                    model=teacher.endpoint.model, extra_headers={"Idempotency-Key": key}, **request
                )
                return _read_answer(answer.http_response.content), "not-an-answer", 0.0
        except TimeoutError:
            return None, "timed-out", 0.0
        except openai.APIStatusError as error:
            asked = error.response.headers.get("retry-after", "")
            return None, failure_reason(error), float(asked) if asked.replace(".", "", 1).isdigit() else 0.0
        except openai.OpenAIError as error:
            reason, has_begun = failure_reason(error), "Connect" not in type(error.__cause__).__name__
            return None, "cut-off" if reason == "unreachable" and has_begun else reason, 0.0


def _read_answer(body: bytes) -> Answer | None:
    """Of a whole chat completion: one that says or calls something, or that ran out of tokens."""
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        parts = list(parts_of({**choice["message"], "role": "assistant"}))
        has_ended = choice.get("finish_reason") != "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, Dropped):
        return None
    text = "\n".join(part for part in parts if isinstance(part, str))
    calls = [replace(part, call_id="") for part in parts if isinstance(part, ToolCall)]
    if has_ended and not (text or calls):
        return None
    counts = (typed(int, at(found, "usage", key)) for key in ("prompt_tokens", "completion_tokens"))
    message = assistant_message(text, calls) if has_ended else None
    return Answer(message, *(None if count is None or count < 0 else count for count in counts))


def _with_text(message: Message) -> Message:
    """The message with its calls' arguments as text, which servers want."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message
