"""What a server's answer says: ids, log-probabilities, text. Whatever is not whole is no answer."""

from __future__ import annotations

import json
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.records import Completion, StopReason

_TOKEN_ID = "token_id:"  # noqa: S105  vLLM's way to write an id as a token
_MOST_IDS = 2**31  # no tokenizer has more, and none can read a larger number
_LOWEST_LOGP = -1e30  # further down nothing fits into float32
_ROUNDING = 1e-2  # a log-probability above 0 is none, but for the arithmetic of a server
_REASONS = {"stop": StopReason.FINISHED, "length": StopReason.LENGTH}


class NotAnAnswer(Exception):
    """The body is no whole answer; ``reason`` is a short name that is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_token_answer(body: bytes, prompt_ids: tuple[int, ...], max_new_tokens: int) -> Completion:
    """A completion of ``/v1/completions`` with the ids that were sampled.

    Raises:
        NotAnAnswer: garbage, half an answer, or numbers that do not fit together.
        UsageError: a whole answer without ids, or to another prompt than the one that was sent (CR0827).
    """
    choice = _choice(body)
    seen = choice.get("prompt_token_ids")
    if seen is not None and seen != list(prompt_ids):
        raise _other_ids("the server saw another prompt than the ids that were sent")
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, dict) else {}
    ids = choice.get("token_ids")
    if ids is None:
        ids = _ids_as_tokens(logprobs.get("tokens"))
    if ids is None:
        raise _other_ids("the server gives no token ids")
    logp = logprobs.get("token_logprobs") or []
    text, reason = choice.get("text"), _REASONS.get(str(choice.get("finish_reason")))
    if not isinstance(text, str) or reason is None:
        raise NotAnAnswer("not-an-answer")
    if not _are_ids(ids) or not _are_log_probs(logp) or len(logp) not in (0, len(ids)):
        raise NotAnAnswer("numbers-do-not-fit")
    if not ids or len(ids) > max_new_tokens:
        raise NotAnAnswer("numbers-do-not-fit")
    return Completion(tuple(ids), _sound(text), reason, tuple(float(number) for number in logp))


def _choice(body: bytes) -> dict[str, Any]:
    try:
        choice = json.loads(body)["choices"][0]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        raise NotAnAnswer("not-an-answer") from None
    if not isinstance(choice, dict):
        raise NotAnAnswer("not-an-answer")
    return choice


def _ids_as_tokens(tokens: Any) -> list[int] | None:
    """Ids that are written as ``token_id:N``; None where tokens are texts, which are no ids."""
    if not isinstance(tokens, list) or not tokens:
        return None
    numbers = [str(token).removeprefix(_TOKEN_ID) for token in tokens if str(token).startswith(_TOKEN_ID)]
    if len(numbers) != len(tokens) or not all(n.isascii() and n.isdigit() and len(n) < 16 for n in numbers):
        return None
    return [int(number) for number in numbers]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < _MOST_IDS for each in value)


def _are_log_probs(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(each) in (int, float) and _LOWEST_LOGP <= each <= _ROUNDING for each in value
    )


def _sound(text: str) -> str:
    """Half of a surrogate pair may stand in JSON, but in no text that is stored or sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _other_ids(problem: str) -> UsageError:
    return UsageError(
        "CR0827",
        f"{problem}, so nothing that it samples can be trained on.",
        where="/v1/completions",
        fix="serve the model with vLLM 0.10.2 or newer.",
    )
