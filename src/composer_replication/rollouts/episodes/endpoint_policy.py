"""A policy behind an OpenAI-compatible server: token ids both ways."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import Completion
from composer_replication.rollouts.episodes.conversation import RefusedRequestError
from composer_replication.rollouts.episodes.endpoint_answers import NotAnAnswer, read_token_answer
from composer_replication.rollouts.episodes.http_exchange import ExchangeFailed, HttpAnswer, exchange
from composer_replication.tasks.instructions.instruction_endpoint import Endpoint, open_endpoint

T = TypeVar("T")
_CHAT = "/chat/completions"
_PASSING = {408, 409, 425, 429}
"""Refusals that a later request may not meet; 5xx too."""
_TELLING = {400, 404, 413, 422}
"""Refusals whose body helps and names no key."""
_TOO_LONG = {400, 413}
"""What servers answer to a request beyond their context, among others."""


@dataclass(frozen=True, slots=True)
class RetryOptions:
    """How often a server is asked again.

    Args:
        answer_seconds: for one answer, from the connection to its last byte.
        total_seconds: for all tries and the pauses between them.
        max_tries: of one request.
        first_pause_seconds: before the second try; doubled each time, at most ``max_pause_seconds``, and shortened
            at random by up to a half. A ``Retry-After`` of the server takes its place where it is longer.
        max_pause_seconds: most of a pause that we choose ourselves.
        max_connections: requests at a time; each has a thread. With fewer than there are episodes at a time they
            wait for one another, and that counts as time of their answers.

    Raises:
        UsageError: a value that is not above 0 (CR0820).
    """

    answer_seconds: float = 600.0
    total_seconds: float = 1200.0
    max_tries: int = 8
    first_pause_seconds: float = 0.5
    max_pause_seconds: float = 30.0
    max_connections: int = 256

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(
                    "CR0820",
                    f"{name} is {getattr(self, name)!r}, and has to be above 0.",
                    where=f"RetryOptions.{name}",
                    fix="leave it out: the default is good.",
                )


class _Server:
    """Asks, and asks again; the key is in no repr, no message and no file."""

    def __init__(self, endpoint: Endpoint, url: str, retries: RetryOptions) -> None:
        self.counts: Counter[str] = Counter()
        self._endpoint, self._url, self._retries = endpoint, url, retries
        self._threads = ThreadPoolExecutor(retries.max_connections, "endpoint")

    async def ask(self, request: Mapping[str, Any], read: Callable[[bytes], T], *, seed: int) -> T:
        """What ``read`` makes of the body of a good answer; it raises ``NotAnAnswer`` for any other body."""
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._endpoint.key:
            headers["Authorization"] = f"Bearer {self._endpoint.key}"
        retries = self._retries
        shortened = random.Random(seed)  # noqa: S311  a pause is no secret
        end = time.monotonic() + retries.total_seconds
        reason = "nothing was asked"
        for number in range(retries.max_tries):
            pause = min(retries.first_pause_seconds * 2**number, retries.max_pause_seconds)
            pause *= 1 - shortened.random() / 2
            seconds = min(retries.answer_seconds, end - time.monotonic())
            if seconds <= 0:
                break
            try:
                answer = await exchange(self._url, body, headers, seconds=seconds, threads=self._threads)
                if answer.status == 200:
                    found = read(answer.body)
                    self.counts["answered"] += 1
                    return found
                reason = f"http-{answer.status}"
                self._refuse_for_good(answer)
                pause = max(pause, retry_after(answer.headers.get("retry-after", "")))
            except (ExchangeFailed, NotAnAnswer) as failure:
                reason = failure.reason
            self.counts[reason] += 1
            if number + 1 == retries.max_tries or time.monotonic() + pause >= end:
                break
            await asyncio.sleep(pause)
        self.counts["given-up"] += 1
        raise SandboxFailure(
            "CR0824",
            f"the policy's server gave no answer in {number + 1} tries; the last one: {reason}.",
            fix="look whether the server runs and at its log; EpisodeOptions.max_concurrent lowers its load.",
        )

    def close(self) -> None:
        """Let the threads go; what they still wait for is cut by its time-out."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _refuse_for_good(self, answer: HttpAnswer) -> None:
        """Raise where asking again cannot help: that is the run's mistake, and no episode's."""
        if answer.status in _PASSING or answer.status >= 500:
            return
        said = " ".join(answer.body[:2000].decode("utf-8", "replace").split())[:300]
        if answer.status not in _TELLING or (self._endpoint.key and self._endpoint.key in said):
            said = ""
        kind = RefusedRequestError if answer.status in _TOO_LONG else UsageError
        raise kind(
            "CR0826",
            f"the policy's server refuses the request (HTTP {answer.status}){': ' if said else '.'}{said}",
            where=f"model {self._endpoint.model}",
            fix="check address, model and key; max_context_tokens must not be above the server's own limit.",
        )


class EndpointPolicy:
    """A ``TokenPolicy`` over ``/v1/completions``: ids go in, ids and their log-probabilities come back (vLLM).

    The server is asked for ``return_token_ids``; where it tells the prompt's ids they must be those that were sent.
    Log-probabilities are those that the server reports: vLLM's are of the raw model, before temperature, unless
    it was started otherwise.

    Args:
        endpoint: server, model and key, of ``open_policy_endpoint``.
        retries: time-outs and pauses.
        extra: further fields of each request, ``{"top_p": 1.0}`` for example.

    ``counts`` has ``answered``, ``given-up`` and each reason for which a request was repeated.

    Raises (when sampling):
        SandboxFailure: no answer after all tries (CR0824).
        UsageError: the server refuses for good (CR0826), or gives no ids, or saw another prompt (CR0827).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        retries: RetryOptions | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        url = f"{endpoint.url.removesuffix(_CHAT)}/completions"
        self._model, self._extra = endpoint.model, dict(extra or {})
        self._server = _Server(endpoint, url, retries or RetryOptions())
        self.counts = self._server.counts

    async def sample(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Completion:
        prompt = tuple(prompt_ids)
        request = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "n": 1,
            "stream": False,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            **self._extra,
        }
        return await self._server.ask(
            request, lambda body: read_token_answer(body, prompt, max_new_tokens), seed=seed
        )

    def close(self) -> None:
        self._server.close()


def open_policy_endpoint(url: str, model: str, key_variable: str = "") -> Endpoint:
    """A server from what a user typed; nothing is asked yet.

    Args:
        url: with or without ``/v1``.
        model: its name there.
        key_variable: environment variable that holds the key; empty: none is sent.

    Raises:
        UsageError: an address that is none, no model, or an empty variable (CR0826).
    """
    try:
        return open_endpoint(url, model, key_variable)
    except UsageError as error:
        raise UsageError(
            "CR0826",
            f"the policy's server cannot be asked: {error.message}",
            where="open_policy_endpoint",
            fix="give http://HOST:PORT/v1, the model's name and, where it wants one, the variable with its key.",
        ) from None


def retry_after(text: str) -> float:
    """Seconds that a server asks for, as a number or a date; 0 where it says nothing that can be read."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
