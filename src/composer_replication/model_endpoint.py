"""A model on a server with an OpenAI-compatible interface, asked through OpenAI's own client (the extra ``openai``)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_replication.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from types import ModuleType

_ADDRESS = re.compile(
    r"(?P<server>(?i:https?)://(?:\[[\da-fA-F:.]+\]|[^\s/?#@:\[\]]+)(?::(?P<port>\d{1,5}))?)(?P<path>(?:/[^\s?#]*)?)"
)
_OF_OPENAI = ("OpenAI-Organization", "OpenAI-Project")  # headers from variables meant for OpenAI's own server


class EndpointFailed(Exception):
    """No answer came; its text is a short name that is counted. Neither address nor key is in it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and a model on it; the key is in no repr, no message and no file.

    ``url`` ends where the routes begin, most often with ``/v1``. The client asks ``max_retries`` times again, by its own
    rules: connections that break, time-outs, HTTP 408, 409, 429 and from 500 on, with growing pauses.
    """

    url: str
    model: str
    key: str = field(default="", repr=False)
    timeout_seconds: float = 120.0  # for one answer; a large model on a slow machine needs a minute
    max_retries: int = 2

    def client(self, *, is_async: bool = False) -> Any:
        """``openai.OpenAI`` or ``openai.AsyncOpenAI``, as a context manager, with no key or name of its variables but ours."""
        openai = openai_package()
        http = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
        return (openai.AsyncOpenAI if is_async else openai.OpenAI)(
            base_url=self.url,
            api_key=self.key or "none",
            timeout=self.timeout_seconds,
            max_retries=self.max_retries,
            default_headers={name: openai.Omit() for name in _OF_OPENAI},
            # The key is for the server that was named, and for no other one that it points to.
            http_client=http(follow_redirects=False),
        )

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that the model answers.

        Raises:
            EndpointFailed: ``unreachable``, ``timed-out``, ``http-STATUS``, ``not-an-answer``, ``refused`` (the model says
                so) or ``cut-off`` (it ran out of tokens).
        """
        with self.client() as client:
            try:
                answer = client.chat.completions.create(model=self.model, messages=list(messages))
                [choice, *_] = answer.choices
                text, refusal = choice.message.content, choice.message.refusal
            except Exception as error:  # noqa: BLE001  what is no JSON, or of another form, the client meets in many ways
                raise EndpointFailed(failure_reason(error)) from None
        if refusal or not isinstance(text, str):
            raise EndpointFailed("refused" if refusal else "not-an-answer")
        if choice.finish_reason == "length":
            raise EndpointFailed("cut-off")
        return text


def openai_package() -> ModuleType:
    """The package ``openai``, imported where a server is first asked."""
    with needs_extra("openai", "asking a model on a server"):
        import openai
    return openai


def failure_reason(error: Exception) -> str:
    """A short name for what the client raised."""
    openai = openai_package()
    if isinstance(error, openai.APITimeoutError):
        return "timed-out"
    if isinstance(error, openai.APIConnectionError):
        return "unreachable"
    return f"http-{error.status_code}" if isinstance(error, openai.APIStatusError) else "not-an-answer"


def open_endpoint(url: str, model: str, key_variable: str = "") -> Endpoint:
    """An endpoint from what a user typed, refused where it is none (CR0206); nothing is asked yet.

    ``url`` may end with ``/v1`` or ``/v1/chat/completions``; the environment variable ``key_variable`` holds the key, if any.
    """
    key = os.environ.get(key_variable, "").strip() if key_variable else ""
    problem, where, address = "", "--instructions-from", _ADDRESS.fullmatch(url)
    if address is None or (address["port"] and not 0 < int(address["port"]) < 2**16):
        problem = "the address is not http://HOST or https://HOST, without user, password and query"
    elif not model:
        problem, where = "no model is named", "--instructions-model"
    elif key_variable and not (key and key.isascii() and key.isprintable()):
        problem, where = f"the environment variable {key_variable!r} holds no key", "--instructions-key-env"
    if problem or address is None:
        fix = "--instructions-from http://127.0.0.1:8000/v1 --instructions-model NAME [--instructions-key-env VARIABLE]"
        raise UsageError("CR0206", f"{problem}.", where=where, fix=fix)
    path = address["path"].rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    return Endpoint(f"{address['server']}{path}/v1", model, key)
