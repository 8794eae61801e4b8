"""Ask a server with an OpenAI-compatible ``/v1/chat/completions`` one question. Standard library only."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from composer_replication.errors import UsageError

TIMEOUT_SECONDS = 120.0
"""For one answer; a large model on a slow machine needs a minute."""
MAX_ANSWER_BYTES = 1024 * 1024
_CHAT = "/chat/completions"


class EndpointFailed(Exception):
    """No answer came; ``reason`` is a short name that is counted. Neither address nor key is in it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and a model on it; the key is in no repr, no message and no file."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    timeout_seconds: float = TIMEOUT_SECONDS

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that the model answers.

        Raises:
            EndpointFailed: ``unreachable``, ``timed-out``, ``http-STATUS``, ``too-large``,
                ``not-an-answer``, ``refused`` (the model says so) or ``cut-off`` (it ran out of tokens).
        """
        body = json.dumps({"model": self.model, "messages": list(messages), "stream": False}).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url, body, headers)  # noqa: S310  the scheme was checked
        try:
            data = self._read(request)
        except urllib.error.HTTPError as error:
            error.close()
            raise EndpointFailed(f"http-{error.code}") from None
        except TimeoutError:
            raise EndpointFailed("timed-out") from None
        except (OSError, HTTPException, ValueError) as error:
            is_late = isinstance(getattr(error, "reason", None), TimeoutError)
            raise EndpointFailed("timed-out" if is_late else "unreachable") from None
        return _content(data)

    def _read(self, request: urllib.request.Request) -> bytes:
        """The answer's bytes; the whole of it has to arrive in time."""
        deadline = time.monotonic() + self.timeout_seconds
        opener = urllib.request.build_opener(_NoRedirect)
        data = b""
        with opener.open(request, timeout=self.timeout_seconds) as answer:
            while chunk := answer.read1(65536):
                data += chunk
                if len(data) > MAX_ANSWER_BYTES:
                    raise EndpointFailed("too-large")
                if time.monotonic() > deadline:
                    raise TimeoutError
        return data


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the server that was named, and for no other one that it points to."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _content(data: bytes) -> str:
    try:
        choice = json.loads(data)["choices"][0]
        message = choice["message"]
        text = message["content"]
        is_refused, is_cut = bool(message.get("refusal")), choice.get("finish_reason") == "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise EndpointFailed("not-an-answer") from None
    if is_refused:
        raise EndpointFailed("refused")
    if not isinstance(text, str):
        raise EndpointFailed("not-an-answer")
    if is_cut:
        raise EndpointFailed("cut-off")
    return text


def open_endpoint(
    url: str, model: str, key_variable: str = "", *, timeout_seconds: float = TIMEOUT_SECONDS
) -> Endpoint:
    """An endpoint from what a user typed; nothing is asked yet.

    Args:
        url: of the server, with or without ``/v1`` or ``/v1/chat/completions``.
        model: its name there.
        key_variable: environment variable that holds the key; empty: none is sent.
        timeout_seconds: for one answer.

    Raises:
        UsageError: an address that is none, no model, or an empty variable (CR0455).
    """
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        has_more = bool(parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        is_good = has_more = False
    key = os.environ.get(key_variable, "").strip() if key_variable else ""
    if not is_good:
        problem, where = "the address is not http://HOST or https://HOST", "--instructions-from"
    elif has_more:
        problem, where = "the address holds a user, a password or a query", "--instructions-from"
    elif not model:
        problem, where = "no model is named", "--instructions-model"
    elif key_variable and not (key and key.isascii() and key.isprintable()):
        problem = f"the environment variable {key_variable!r} holds no key"
        where = "--instructions-key-env"
    else:
        path = parts.path.rstrip("/")
        end = "" if path.endswith(_CHAT) else _CHAT if path.endswith("/v1") else f"/v1{_CHAT}"
        return Endpoint(f"{parts.scheme}://{parts.netloc}{path}{end}", model, key, timeout_seconds)
    raise UsageError(
        "CR0455",
        f"{problem}.",
        where=where,
        fix="--instructions-from http://127.0.0.1:8000/v1 --instructions-model NAME [--instructions-key-env VARIABLE]",
    )
