"""A policy behind a vLLM server: token ids both ways over ``/v1/completions``, with log-probabilities as they were sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.errors import MissingError, SandboxFailure, UsageError
from composer_replication.model_endpoint import (
    Endpoint,
    failure_reason,
    openai_package,
)
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.episode_options import RefusedRequestError

ANSWER_SECONDS = 600.0
"""For one answer, from the connection to its end."""
NUM_RETRIES = 5
"""The client's pauses grow to 8 seconds: a server that restarts within half a minute costs nothing."""
SERVE_COMMAND = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --max-logprobs -1"
_TOO_LONG = {400, 413}
_PASSING = {408, 409, 429}
_REASONS = {"stop": StopReason.FINISHED, "length": StopReason.LENGTH}


class ServedPolicy:
    """A ``TokenPolicy`` over a vLLM server; use it as an asynchronous context manager, which opens and closes the client.

    Requests of many episodes go out at once, and the server batches them as they come (continuous batching). A seed
    goes along, but a server's answer depends in its last bits on what else it samples at the moment.

    Args:
        endpoint: server, model and key.
        filters: ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, as ``filters_of`` gives them. All are sent: a
            server takes what is left out from the model's ``generation_config.json``.
        stop_token_ids: end an answer, and are its last id.

    ``counts`` has ``answered`` and each reason for which an answer did not come.

    Raises (when sampling):
        SandboxFailure: one answer did not come, although the client asked again (CR0824).
        MissingError: nobody answers at the address any more (CR0824): the run ends, and can be resumed.
        RefusedRequestError: the request is too long for the server (CR0826); a ``UsageError``.
        UsageError: the server refuses for good (CR0826), or gives no ids or log-probabilities, or saw another prompt
            (CR0826).
    """

    def __init__(
        self, endpoint: Endpoint, *, filters: Mapping[str, Any], stop_token_ids: Sequence[int] = ()
    ) -> None:
        self.endpoint, self.counts = endpoint, Counter[str]()
        self._ask = {
            "top_k": 0,
            "min_p": 0.0,
            **{name: value for name, value in filters.items() if name != "top_p" and value is not None},
            "stop_token_ids": list(stop_token_ids),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        self._top_p = filters.get("top_p", 1.0)
        self._client: Any = None

    async def __aenter__(self) -> ServedPolicy:
        openai = openai_package()
        http = openai.DefaultAsyncHttpxClient(follow_redirects=False)
        self._client = openai.AsyncOpenAI(http_client=http, **self.endpoint.client_options())
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
                top_p=self._top_p,
                seed=seed,
                logprobs=0,
                extra_body=self._ask,
            )
        except Exception as error:  # noqa: BLE001  what is no bug of ours is told as the server's
            raise self._told(error) from None
        completion = read_answer(answer, prompt_ids)
        self.counts["answered"] += 1
        return completion

    def _told(self, error: Exception) -> Exception:
        """What the client raised, as an error of ours; a bug stays what it is."""
        openai = openai_package()
        if not isinstance(error, openai.OpenAIError | ValueError):
            return error
        reason = failure_reason(error)
        self.counts[reason] += 1
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
    """A completion with the ids that were sampled.

    Raises:
        UsageError: no ids or log-probabilities, or an answer to another prompt (CR0826).
        SandboxFailure: half an answer, or no numbers (CR0824).
    """
    try:
        choice = answer.choices[0]
        seen, ids = getattr(choice, "prompt_token_ids", None), getattr(choice, "token_ids", None)
        logp = getattr(choice.logprobs, "token_logprobs", None)
        text, reason = choice.text, _REASONS.get(choice.finish_reason)
    except (AttributeError, IndexError, TypeError):
        raise _half_an_answer("it has no choice") from None
    if ids is None or seen is None:
        raise _unfit("gives no token ids")
    if seen != list(prompt_ids):
        raise _unfit("saw another prompt than the ids that were sent")
    if logp is None:
        raise _unfit("gives no log-probabilities")
    if not isinstance(text, str) or reason is None:
        raise _half_an_answer("it has no text, or did not end")
    try:  # that they fit together, whoever keeps the answer sees
        sampled, sampled_logp = tuple(map(int, ids)), tuple(map(float, logp))
    except (TypeError, ValueError, OverflowError):
        raise _half_an_answer("its ids or log-probabilities are none") from None
    sound = text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair may stand in JSON
    return Completion(sampled, sound, reason, sampled_logp)


def _half_an_answer(problem: str) -> SandboxFailure:
    return SandboxFailure("CR0824", f"the policy's server gave an answer that is not whole: {problem}.")


def _unfit(problem: str) -> UsageError:
    return UsageError(
        "CR0826",
        f"the policy's server {problem}, so nothing that it samples can be trained on.",
        where="/v1/completions",
        fix=f"serve the model with vLLM: {SERVE_COMMAND}",
    )
