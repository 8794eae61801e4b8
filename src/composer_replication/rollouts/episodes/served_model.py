"""What a vLLM server says of itself, and whether it fits: asked before the first step, when a mistake costs nothing yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.interfaces import Tokenizer
from composer_replication.model_endpoint import (
    Endpoint,
    failure_reason,
    open_endpoint,
    openai_package,
)
from composer_replication.rollouts.episodes.agent_loop import run_anywhere
from composer_replication.rollouts.episodes.served_policy import (
    NUM_RETRIES,
    SERVE_COMMAND,
    ServedPolicy,
    server_gone,
)

PROBE = "def probe(x):\n\treturn {'Ünicode': x}  # 1234567890 <|im_end|>\n"
"""Text on which tokenizers of different models part: spaces, digits, letters beyond ASCII, a special token."""
_QUESTION_SECONDS = 30.0
_PROCESSED = "processed_logprobs"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its server describes it.

    ``max_context_tokens`` is None where the server does not say;
    ``settings`` is its whole configuration, empty unless it was started with ``VLLM_SERVER_DEV_MODE=1``.
    """

    endpoint: Endpoint
    max_context_tokens: int | None
    version: str
    settings: Mapping[str, Any]

    def setting(self, name: str) -> Any:
        """A value of the model's part of the configuration; None where it is not told."""
        return (self.settings.get("model_config") or {}).get(name)


def open_server(url: str, model: str = "", key_variable: str = "") -> Endpoint:
    """A sampling server from what a user typed; nothing is asked yet. Without ``model`` it is the first that is served.

    Raises:
        UsageError: an address that is none, or an empty variable (CR0826).
    """
    try:
        endpoint = open_endpoint(url, model or "?", key_variable)
    except UsageError as error:
        raise _unfit(f"it cannot be asked: {error.message.rstrip('.')}", "give http://HOST:PORT/v1") from None
    return replace(endpoint, model=model, max_retries=NUM_RETRIES)


def find_server(
    endpoint: Endpoint, *, wait_seconds: float = 0.0, note: Callable[[str], None] = lambda _: None
) -> ServedModel:
    """Ask a server which model it has.

    Args:
        endpoint: server; an empty ``model`` becomes the first that it serves.
        wait_seconds: how long it may take until the server is up.
        note: told once that it is waited for.

    Raises:
        MissingError: nobody answers there (CR0824).
        UsageError: no such model is served, or what answers is no such server (CR0826).
    """
    openai = openai_package()
    deadline, has_told = time.monotonic() + wait_seconds, False
    quick = replace(endpoint, timeout_seconds=_QUESTION_SECONDS, max_retries=0)
    with openai.OpenAI(**quick.client_options()) as client:
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
            if not has_told:
                note(f"waiting for the server at {endpoint.url}")
                has_told = True
            time.sleep(min(2.0, max(0.0, deadline - time.monotonic())))
        names = [str(card.id) for card in cards]
        if not names or endpoint.model not in ("", *names):
            problem = f"it serves {', '.join(names) or 'no model'}, not {endpoint.model!r}"
            raise _unfit(problem, "name a model that it serves")
        card = cards[names.index(endpoint.model or names[0])]
        limit = getattr(card, "max_model_len", None)
        version = (_asked(client, endpoint, "version") or {}).get("version", "")
        settings = _asked(client, endpoint, "server_info?config_format=json") or {}
    config = settings.get("vllm_config")
    return ServedModel(
        replace(endpoint, model=str(card.id)),
        limit if isinstance(limit, int) else None,
        str(version),
        config if isinstance(config, dict) else {},
    )


def require_fit(
    served: ServedModel,
    tokenizer: Tokenizer,
    *,
    max_context_tokens: int,
) -> None:
    """Stop where the server cannot sample the episodes of a recipe.

    Args:
        served: as it describes itself.
        tokenizer: of the recipe's model.
        max_context_tokens: of the episodes.

    Raises:
        UsageError: another tokenizer, a shorter context, log-probabilities before temperature (CR0826); no ids
            or log-probabilities in its answers (CR0826).
        MissingError, SandboxFailure: it does not answer (CR0824).
    """
    limit = served.max_context_tokens
    if limit is not None and limit < max_context_tokens:
        raise _unfit(
            f"its context has {limit} tokens, and agent.max_context_tokens is {max_context_tokens}",
            f"serve with --max-model-len {max_context_tokens}, or set agent.max_context_tokens to at most {limit}",
        )
    if not has_sampled_logps(served):
        raise _unfit(
            f"it was started with --logprobs-mode {served.setting('logprobs_mode')}: those are not the probabilities that it samples by",
            f"serve with {SERVE_COMMAND}",
        )
    ids = _their_ids(served.endpoint, PROBE)
    ours_ids = tokenizer.encode(PROBE, add_special_tokens=False)
    if ids is not None and ids != ours_ids:
        raise _unfit("its tokenizer is another than that of the recipe's model", "serve the recipe's model")

    async def try_out() -> None:
        async with ServedPolicy(served.endpoint, filters={}) as policy:
            await policy.sample(ours_ids, max_new_tokens=1, temperature=1.0, seed=0)

    run_anywhere(try_out())


def has_sampled_logps(served: ServedModel) -> bool:
    """Whether its log-probabilities are those that it samples by; True where it does not tell."""
    mode = served.setting("logprobs_mode")
    return mode is None or _PROCESSED in str(mode)


def _their_ids(endpoint: Endpoint, text: str) -> list[int] | None:
    """The server's ids of a text; None where it has no such route."""
    openai = openai_package()
    body = {"model": endpoint.model, "prompt": text, "add_special_tokens": False}
    with openai.OpenAI(**replace(endpoint, max_retries=0).client_options()) as client:
        try:
            answer = client.post(_root(endpoint, "tokenize"), body=body, cast_to=object)
        except openai.OpenAIError:
            return None
    found = answer.get("tokens") if isinstance(answer, dict) else None
    return found if isinstance(found, list) else None


def _asked(client: Any, endpoint: Endpoint, path: str) -> dict[str, Any] | None:
    """What a route beside ``/v1`` answers; None where there is none."""
    try:
        answer = client.get(_root(endpoint, path), cast_to=object)
    except openai_package().OpenAIError:
        return None
    return answer if isinstance(answer, dict) else None


def _root(endpoint: Endpoint, path: str) -> str:
    return f"{endpoint.url.removesuffix('/v1')}/{path}"


def _unfit(problem: str, fix: str) -> UsageError:
    return UsageError(
        "CR0826",
        f"the policy's server does not fit: {problem}.",
        where="trl.vllm_server_base_url, --endpoint",
        fix=f"{fix}.",
    )
