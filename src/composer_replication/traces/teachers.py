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
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.model_endpoint import Endpoint, failure_reason, open_endpoint, openai_package
from composer_replication.records import ToolCall
from composer_replication.traces.json_values import at, items_at, json_text
from composer_replication.traces.prompts import Message, assistant_message
from composer_replication.traces.readers.messages import parts_of

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, body TEXT NOT NULL);
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


class AnswerStore:
    """One file of answers and charges.

    Args:
        path: the database; made where there is none.
        max_dollars, max_tokens: the budget over the whole life of the file.
    """

    def __init__(self, path: Path, *, max_dollars: float, max_tokens: int) -> None:
        self._limits = {"max_dollars": max_dollars, "max_tokens": max_tokens}
        self._database = sqlite3.connect(path, isolation_level=None, timeout=60.0)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_TABLES)

    def answer(self, key: str) -> Any:
        """The stored answer, None where there is none."""
        row = self._database.execute("SELECT body FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def spent(self) -> tuple[float, int]:
        """Dollars and tokens, what is set aside included."""
        dollars, tokens = self._database.execute("SELECT dollars, tokens FROM spent").fetchone()
        return float(dollars), int(tokens)

    def reserve(self, key: str, dollars: float, tokens: int) -> int | None:
        """Set aside what a request may cost at most; None where the budget does not have it any more."""
        values = {"key": key, "dollars": dollars, "tokens": tokens, **self._limits}
        made = self._database.execute(_RESERVE, values)
        return made.lastrowid if made.rowcount else None

    def settle(self, charge: int, key: str, body: Any, dollars: float, tokens: int) -> None:
        """Keep an answer, and then what it did cost in the place of what was set aside."""
        text = json.dumps(body, ensure_ascii=False)
        self._database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, text))
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
            if (known := self.store.answer(key)) is not None:
                teacher.counts["cached"] += 1
                return read_answer(known)  # None: it was cut off, and would be again
            found = None if teacher.left_out else await self._bought(teacher, key, request)
        if found is None:
            return None
        answer = read_answer(found)
        teacher.counts["answered" if answer else "cut-off at --answer-tokens"] += 1
        return answer

    async def _bought(self, teacher: Teacher, key: str, request: Mapping[str, Any]) -> Any:
        """The body of an answer, which is stored; None where there is none."""
        most = self.most(teacher, request)
        for number in range(MAX_TRIES):
            # what others of this process have reserved may become free again, and is waited for
            while (charge := self.store.reserve(key, *most)) is None:
                if self._num_reserved == 0:
                    raise BudgetSpent
                await asyncio.sleep(0.05)
            self._num_reserved += 1
            body, reason, asked_seconds = await self._posted(teacher, key, request)
            self._num_reserved -= 1
            if body is not None:
                self.store.settle(charge, key, body, *_cost(teacher, body, most))
                teacher.num_failures = 0
                return body
            if reason not in _BILLED:
                self.store.free(charge)
            teacher.counts[reason] += 1
            if reason.startswith(("http-3", "http-4")) and reason not in _PASSING:
                if reason not in _ONE_REQUEST:
                    teacher.left_out = f"it refuses every request ({reason})"
                return None
            if number + 1 < MAX_TRIES:
                pause = min(self._pause_seconds * 2**number, MAX_PAUSE_SECONDS)
                await asyncio.sleep(max(pause, asked_seconds))
        teacher.num_failures += 1
        if teacher.num_failures >= MAX_FAILURES and not teacher.left_out:
            teacher.left_out = f"{MAX_FAILURES} requests in a row without an answer"
        return None

    async def _posted(self, teacher: Teacher, key: str, request: Mapping[str, Any]) -> tuple[Any, str, float]:
        """One try: the body of an answer, or None, the reason and the seconds that the server asks to wait."""
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
                return _whole(answer.http_response.content), "not-an-answer", 0.0
        except TimeoutError:
            return None, "timed-out", 0.0
        except openai.APIStatusError as error:
            asked = error.response.headers.get("retry-after", "")
            return None, failure_reason(error), float(asked) if asked.replace(".", "", 1).isdigit() else 0.0
        except openai.OpenAIError as error:
            has_begun = "Connect" not in type(error.__cause__).__name__
            reason = failure_reason(error)
            return None, "cut-off" if reason == "unreachable" and has_begun else reason, 0.0


def read_answer(body: Any) -> Message | None:
    """The message of a chat completion that ``_whole`` has taken; None where it ran out of tokens."""
    choice = items_at(body, "choices")[0]
    if at(choice, "finish_reason") == "length":
        return None
    parts = list(parts_of({**choice["message"], "role": "assistant"}))
    text = "\n".join(part for part in parts if isinstance(part, str))
    calls = [replace(part, call_id="") for part in parts if isinstance(part, ToolCall)]
    return assistant_message(text, calls)


def _cost(teacher: Teacher, body: Any, most: tuple[float, int]) -> tuple[float, int]:
    """By the server's own count; by what was reserved where it gives none."""
    num_in, num_out = at(body, "usage", "prompt_tokens"), at(body, "usage", "completion_tokens")
    if not all(type(count) is int and count >= 0 for count in (num_in, num_out)):
        return most
    return teacher.dollars(num_in, num_out), num_in + num_out


def _whole(body: bytes) -> dict[str, Any] | None:
    """The body of a whole answer: JSON with a message that says or calls something, or that ran out of tokens."""
    try:
        found = json.loads(body)
        choice = found["choices"][0]
        has_content = bool(choice["message"].get("content") or choice["message"].get("tool_calls"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return None
    return found if has_content or choice.get("finish_reason") == "length" else None


def _with_text(message: Message) -> Message:
    """The message with its calls' arguments as text, which servers want."""
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    for call in calls:
        call["function"]["arguments"] = json_text(call["function"]["arguments"])
    return {**message, "tool_calls": calls}
