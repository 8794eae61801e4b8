"""Who answers in an episode: a model in this process, over a blocking sampler that takes many prompts at once, or a vLLM server.

The server is asked over ``/v1/completions``: token ids both ways, with log-probabilities as they were sampled.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, Field, ValidationError

from composer_replication.errors import MissingError, SandboxFailure, UsageError
from composer_replication.model_endpoint import Endpoint, failure_reason, open_endpoint, openai_package
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.tokens.token_ledger import Tokenizer

T = TypeVar("T")
ANSWER_SECONDS = 600.0
"""For one answer, from the connection to its end."""
NUM_RETRIES = 5
"""The client's pauses grow to 8 seconds: a server that restarts within half a minute costs nothing."""
SERVE_COMMAND = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --max-logprobs -1"
_TOO_LONG = {400, 413}
_PASSING = {408, 409, 429}
_Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]  # no tokenizer has more
# above 0 by rounding alone; further down nothing fits into float32
_Logp = Annotated[float, Field(strict=True, ge=-1e30, le=1e-2)]


class TokenPolicy(Protocol):
    """Something that continues token ids; many calls may wait at the same time on one event loop.

    ``sample`` ends at an end-of-sequence token, which is the last of ``token_ids`` then (``FINISHED``), or at
    ``max_new_tokens`` (``LENGTH``). The ids are those that were sampled: nobody decodes and encodes them again.

    Raises:
        SandboxFailure: the policy cannot be reached or broke, after its own retries; never for what it wrote.
    """

    async def sample(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Completion: ...


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """How one prompt of a batch is to be continued; its answer may depend on nothing else of the batch."""

    max_new_tokens: int
    temperature: float
    seed: int


SampleBatch = Callable[[list[tuple[int, ...]], list[SampleOptions]], Sequence[Completion]]
"""Blocking; one completion for each prompt, in order. ``options[i]`` belongs to ``prompts[i]``."""


class _Request(NamedTuple):
    prompt_ids: tuple[int, ...]
    options: SampleOptions
    answer: asyncio.Future[Completion]


class BatchingPolicy:
    """A ``TokenPolicy`` that collects requests and samples them together; no deadline of an episode runs meanwhile.

    ``sample_batch`` is called in one thread, never twice at a time, with at most ``max_batch`` prompts. A first request waits
    ``window_seconds`` for others; while a batch is sampled the next one gathers. ``num_expected`` says how many may ask, and
    sampling waits until that many do: so the batches, and with them the last bits of the answers, do not depend on who is slow.
    What waits at a moment is batched in the order of the seeds. A request that was cancelled while it waited is not sampled.
    Whatever the sampler raises reaches every request of its batch.
    """

    def __init__(
        self,
        sample_batch: SampleBatch,
        *,
        max_batch: int = 32,
        window_seconds: float = 0.005,
        num_expected: Callable[[], int] = lambda: 1,
    ) -> None:
        self._sample_batch, self._max_batch, self._window_seconds = sample_batch, max_batch, window_seconds
        self._num_expected = num_expected
        self._waiting: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "sampler")

    async def sample(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Completion:
        loop = asyncio.get_running_loop()
        if self._worker is None or self._worker.done() or self._worker.get_loop() is not loop:
            self._waiting = []  # what an earlier loop left is nobody's
            self._worker = loop.create_task(self._work())
        options = SampleOptions(max_new_tokens, temperature, seed)
        request = _Request(tuple(prompt_ids), options, loop.create_future())
        self._waiting.append(request)
        return await request.answer

    def close(self) -> None:
        """Let the thread go; a batch that is being sampled ends first."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        """Sample whenever as many wait as may ask, until nobody does."""
        await asyncio.sleep(self._window_seconds)
        while self._waiting:
            self._waiting = [request for request in self._waiting if not request.answer.done()]
            if len(self._waiting) < self._num_expected():
                await asyncio.sleep(max(self._window_seconds, 0.001))
                continue
            everybody, self._waiting = sorted(self._waiting, key=lambda each: each.options.seed), []
            for start in range(0, len(everybody), self._max_batch):
                await self._sample(everybody[start : start + self._max_batch])

    async def _sample(self, batch: list[_Request]) -> None:
        prompts, options, answers = (list(column) for column in zip(*batch, strict=True))
        loop = asyncio.get_running_loop()
        try:
            found = list(await loop.run_in_executor(self._thread, self._sample_batch, prompts, options) or ())
            if len(found) != len(batch) or not all(isinstance(each, Completion) for each in found):
                raise UsageError(
                    "CR0821",
                    f"the sampler gave {len(found)} answers for {len(batch)} prompts, or something else than completions.",
                    where="BatchingPolicy",
                    fix="make it return one Completion for each prompt, in order.",
                )
        except Exception as error:  # noqa: BLE001  everybody who waits gets it
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)
            return
        for answer, completion in zip(answers, found, strict=True):
            if not answer.done():
                answer.set_result(completion)


# ---- a vLLM server --------------------------------------------------------------------------------------


class RefusedRequestError(UsageError):
    """A server refuses what it was asked as such (HTTP 400, 413): most often because it is too long for its context.

    In an episode that had an answer already it ends that episode alone (``CONTEXT``).
    """


class _Sampled(BaseModel):
    """The numbers of an answer, as they must be."""

    token_ids: list[_Id] = Field(min_length=1)
    token_logprobs: list[_Logp]
    text: str
    finish_reason: Literal["stop", "length"]


class ServedPolicy:
    """A ``TokenPolicy`` over a vLLM server; use it as an asynchronous context manager, which opens and closes the client.

    Requests of many episodes go out at once, and the server batches them as they come (continuous batching). A seed
    goes along, but a server's answer depends in its last bits on what else it samples at the moment.

    ``filters`` are ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, as ``filters_of`` gives them. All are sent: a server
    takes what is left out from the model's ``generation_config.json``. ``stop_token_ids`` end an answer, and are its last id.

    Raises (when sampling):
        SandboxFailure: one answer did not come, although the client asked again (CR0824).
        MissingError: nobody answers at the address any more (CR0824): the run ends, and can be resumed.
        UsageError: the server refuses for good, gives no ids or log-probabilities, or saw another prompt (CR0826);
            ``RefusedRequestError`` where the request is too long for it.
    """

    def __init__(
        self, endpoint: Endpoint, *, filters: Mapping[str, Any], stop_token_ids: Sequence[int] = ()
    ) -> None:
        self.endpoint = endpoint
        self._ask: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        self._ask |= {name: value for name, value in filters.items() if value is not None}
        self._ask |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        self._ask["stop_token_ids"] = list(stop_token_ids)
        self._client: Any = None

    async def __aenter__(self) -> ServedPolicy:
        self._client = self.endpoint.client(is_async=True)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def sample(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Completion:
        try:
            answer = await self._client.completions.create(
                model=self.endpoint.model,
                prompt=list(prompt_ids),
                max_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                logprobs=0,
                extra_body=self._ask,
            )
        except Exception as error:  # noqa: BLE001  what is no bug of ours is told as the server's
            raise self._told(error) from None
        return read_answer(answer, prompt_ids)

    def _told(self, error: Exception) -> Exception:
        """What the client raised, as an error of ours; a bug stays what it is."""
        if not isinstance(error, openai_package().OpenAIError | ValueError):
            return error
        reason = failure_reason(error)
        if reason == "unreachable":
            return server_gone(f"nobody answers at {self.endpoint.url}")
        status = getattr(error, "status_code", 500)
        if status >= 500 or status in _PASSING:
            return SandboxFailure(
                "CR0824",
                f"the policy's server gave no answer, although it was asked again: {reason}.",
                fix="look whether the server runs and at its log; a lower agent.max_concurrent lowers its load.",
            )
        said = " ".join(str(getattr(error, "message", "")).split())[:300]
        if self.endpoint.key and self.endpoint.key in said:
            said = ""
        kind = RefusedRequestError if status in _TOO_LONG else UsageError
        return kind(
            "CR0826",
            f"the policy's server refuses the request (HTTP {status}){': ' if said else '.'}{said}",
            where=f"model {self.endpoint.model}",
            fix="check address, model and key; max_context_tokens must not be above the server's own limit.",
        )


def server_gone(problem: str) -> MissingError:
    """The sampling server does not answer any more."""
    return MissingError(
        "CR0824",
        f"the policy's server is gone: {problem}.",
        where="trl.vllm_server_base_url, --endpoint",
        fix="start it again and resume the run, or repeat the command.",
    )


def read_answer(answer: Any, prompt_ids: Sequence[int]) -> Completion:
    """A completion with the ids that were sampled."""
    try:
        choice = answer.choices[0]
        seen, ids = getattr(choice, "prompt_token_ids", None), getattr(choice, "token_ids", None)
        logp = getattr(choice.logprobs, "token_logprobs", None)
        reason = getattr(choice, "finish_reason", None)
        raw = {"token_ids": ids, "token_logprobs": logp, "text": choice.text, "finish_reason": reason}
    except (AttributeError, IndexError, TypeError):
        raise _half_an_answer("it has no choice") from None
    missing = "token ids" if ids is None or seen is None else "log-probabilities" if logp is None else ""
    if missing or seen != list(prompt_ids):
        problem = f"gives no {missing}" if missing else "saw another prompt than the ids that were sent"
        lost = f"it {problem}, so nothing that it samples can be trained on"
        raise _unfit(lost, f"serve with {SERVE_COMMAND}")
    try:
        found = _Sampled.model_validate(raw)
    except ValidationError as error:
        raise _half_an_answer(f"its {error.errors()[0]['loc'][0]} cannot be") from None
    if len(found.token_ids) != len(found.token_logprobs):
        raise _half_an_answer(f"it has {len(found.token_logprobs)} log-probabilities")
    text = found.text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair may stand in JSON
    stop_reason = StopReason.FINISHED if found.finish_reason == "stop" else StopReason.LENGTH
    return Completion(tuple(found.token_ids), text, stop_reason, tuple(found.token_logprobs))


def _half_an_answer(problem: str) -> SandboxFailure:
    return SandboxFailure("CR0824", f"the policy's server gave an answer that is not whole: {problem}.")


PROBE = "def probe(x):\n\treturn {'Ünicode': x}  # 1234567890 <|im_end|>\n"
"""Text on which tokenizers of different models part: spaces, digits, letters beyond ASCII, a special token."""
_QUESTION_SECONDS = 30.0
_SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its server describes it; ``root`` is the folder or name of its weights.

    ``max_context_tokens`` is None where it does not say, ``logprobs_mode`` empty unless started with ``VLLM_SERVER_DEV_MODE=1``.
    """

    endpoint: Endpoint
    root: str
    max_context_tokens: int | None
    version: str
    logprobs_mode: str

    @property
    def has_sampled_logps(self) -> bool:
        """Whether its log-probabilities are those that it samples by; True where it does not tell."""
        return not self.logprobs_mode or "processed_logprobs" in self.logprobs_mode


def open_server(url: str, key_variable: str = "") -> Endpoint:
    """A sampling server from what a user typed; nothing is asked yet, so it has no name of a model."""
    try:
        endpoint = open_endpoint(url, "?", key_variable)
    except UsageError as error:
        raise _unfit(f"it cannot be asked: {error.message.rstrip('.')}", "give http://HOST:PORT/v1") from None
    return replace(endpoint, model="", max_retries=NUM_RETRIES, timeout_seconds=ANSWER_SECONDS)


def find_server(endpoint: Endpoint, *, wait_seconds: float = 0.0) -> ServedModel:
    """Ask a server which model it serves first. One that is not up yet is waited for, at most ``wait_seconds``.

    Raises:
        MissingError: nobody answers there (CR0824).
        UsageError: it serves no model, or what answers is no such server (CR0826).
    """
    deadline = time.monotonic() + wait_seconds
    quick = replace(endpoint, timeout_seconds=_QUESTION_SECONDS, max_retries=0)
    with quick.client() as client:
        while True:
            try:
                cards = client.models.list().data or []
                break
            except Exception as error:  # noqa: BLE001  whatever answers there, it is no such server
                reason = failure_reason(error)
            if reason not in ("unreachable", "timed-out", "http-503"):
                raise _unfit(f"/v1/models answers {reason}", "check the address and the key")
            if time.monotonic() >= deadline:
                raise server_gone(f"nobody answers at {endpoint.url}")
            time.sleep(min(2.0, max(0.0, deadline - time.monotonic())))
        if not cards:
            raise _unfit("it serves no model", f"serve with {SERVE_COMMAND}")
        card = cards[0]
        limit = getattr(card, "max_model_len", None)
        version = _told_by(client, endpoint, "version").get("version", "")
        settings: Any = _told_by(client, endpoint, "server_info?config_format=json")
        for name in ("vllm_config", "model_config", "logprobs_mode"):
            settings = settings.get(name) if isinstance(settings, dict) else None
    return ServedModel(
        replace(endpoint, model=str(card.id)),
        str(getattr(card, "root", None) or card.id),
        limit if isinstance(limit, int) else None,
        str(version),
        str(settings or ""),
    )


def require_fit(
    served: ServedModel,
    tokenizer: Tokenizer,
    *,
    max_context_tokens: int,
    model_name: str,
    model_config: Mapping[str, Any],
) -> None:
    """Stop where the server cannot sample the episodes of a recipe; ``model_config`` is as in ``config.json``.

    Raises:
        UsageError: another model or tokenizer, a shorter context, log-probabilities before temperature, no ids or
            log-probabilities in its answers (CR0826).
        MissingError, SandboxFailure: it does not answer (CR0824).
    """
    endpoint, limit, mode = served.endpoint, served.max_context_tokens, served.logprobs_mode
    if limit is not None and limit < max_context_tokens:
        raise _unfit(
            f"its context has {limit} tokens, and agent.max_context_tokens is {max_context_tokens}",
            f"serve with --max-model-len {max_context_tokens}, or set agent.max_context_tokens to at most {limit}",
        )
    other = _other_model(served.root, model_name, model_config)
    if other:
        raise _unfit(f"another model is behind it: {other}", "serve the model of the recipe")
    if not served.has_sampled_logps:
        problem = (
            f"it was started with --logprobs-mode {mode}: those are not the probabilities that it samples by"
        )
        raise _unfit(problem, f"serve with {SERVE_COMMAND}")
    ours_ids = tokenizer.encode(PROBE, add_special_tokens=False)
    ask = {"model": endpoint.model, "prompt": PROBE, "add_special_tokens": False}
    with replace(endpoint, max_retries=0).client() as client:
        ids = _told_by(client, endpoint, "tokenize", ask).get("tokens", ours_ids)
    if ids != ours_ids:
        raise _unfit("its tokenizer is another than that of the recipe's model", "serve the recipe's model")

    async def try_out() -> None:
        async with ServedPolicy(endpoint, filters={}) as policy:
            await policy.sample(ours_ids, max_new_tokens=1, temperature=1.0, seed=0)

    run_anywhere(try_out())


def _other_model(root: str, model_name: str, model_config: Mapping[str, Any]) -> str:
    """How the served model is another: by its shape where its weights lie on this machine, by name where both are names and no
    folders. Other weights of the same shape are no fault in training: they are replaced before the first generation.
    """
    described = Path(root) / "config.json"
    if described.is_file():
        theirs = json.loads(described.read_text())
        for name in _SHAPE:
            if theirs.get(name) != model_config.get(name):
                return f"its {name} is {theirs.get(name)}, and that of the recipe's model {model_config.get(name)}"
    elif root != model_name and all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in (root, model_name)):
        return f"{root}, and the recipe names {model_name}"
    return ""


def _told_by(
    client: Any, endpoint: Endpoint, path: str, ask: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a route beside ``/v1`` answers; nothing where there is none."""
    url = f"{endpoint.url.removesuffix('/v1')}/{path}"
    send = client.get if ask is None else partial(client.post, body=ask)
    try:
        answer = send(url, cast_to=object)
    except openai_package().OpenAIError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _unfit(problem: str, fix: str) -> UsageError:
    return UsageError(
        "CR0826",
        f"the policy's server does not fit: {problem}.",
        where="trl.vllm_server_base_url, --endpoint",
        fix=f"{fix}.",
    )


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, in a thread of its own where this one has a running loop: a notebook's has."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "episodes") as threads:
        return threads.submit(copy_context().run, asyncio.run, work).result()
