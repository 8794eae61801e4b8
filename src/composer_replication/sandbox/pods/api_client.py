"""Requests to an API server, repeated where it asks for that.

A request is repeated after 429 (as long as ``Retry-After`` says), 5xx, 410 and a connection that breaks,
with a pause that doubles, until ``patience_seconds`` are over. Creating is safe to repeat because
every object has a name of ours: the second try meets 409, which the caller reads as done.
Reference: github.com/kubernetes/community, sig-architecture/api-conventions, "HTTP Status codes".
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

from composer_replication.errors import SandboxFailure
from composer_replication.sandbox.jailed_tree import failure
from composer_replication.sandbox.pods.cluster_access import ClusterAccess

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_LONGEST_RETRY_AFTER_SECONDS = 30.0
REPEATED = (410, 429, 500, 502, 503, 504)
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT = 401, 403, 404, 409


class ApiRefusal(Exception):
    """An answer with an error status, as the server's ``Status`` object words it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    def as_failure(self, what: str) -> SandboxFailure:
        """One sentence: who we are (CR0332) or what we ask (CR0333) does not please the server."""
        said = f"{self.message} ({self.status} {self.reason})"
        if self.status in (UNAUTHORIZED, FORBIDDEN):
            return failure("CR0332", f"the cluster does not let us {what}: {said}.")
        return failure("CR0333", f"the cluster does not {what}: {said}.")


class ApiClient:
    """One cluster.

    Args:
        access: where and as whom.
        patience_seconds: how long a request is repeated before it has failed.
        timeout_seconds: of one connection.
    """

    def __init__(
        self, access: ClusterAccess, *, patience_seconds: float = 60.0, timeout_seconds: float = 30.0
    ) -> None:
        self.access = access
        self._patience_seconds = patience_seconds
        self.timeout_seconds = timeout_seconds

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The answer's object.

        Raises:
            ApiRefusal: an error status that no repetition helped.
            SandboxFailure: the server cannot be reached, or answers what is no JSON object (CR0331).
        """
        deadline = time.monotonic() + self._patience_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            wanted, problem = 0.0, None
            try:
                return self._once(method, path, query, body)
            except _RetryableError as error:
                wanted, problem = error.after_seconds, error.problem
            wait = max(pause, min(wanted, _LONGEST_RETRY_AFTER_SECONDS))
            if time.monotonic() + wait > deadline:
                raise problem
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        connection = self.connection()
        payload = None if body is None else json.dumps(body)
        headers = {"Accept": "application/json", "Connection": "close", **self.authorization()}
        if payload is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, self.target(path, query), payload, headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise _RetryableError(self.gone(error)) from error
        finally:
            connection.close()
        if answer.status >= 400:
            refusal = refusal_of(answer.status, text)
            if answer.status in REPEATED:
                raise _RetryableError(refusal, _retry_after(answer.getheader("Retry-After"))) from refusal
            raise refusal
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise failure(
                "CR0331", "what answers there is no API server: its answer is no object.", self.access.server
            )
        return found

    def connection(self) -> http.client.HTTPConnection:
        """A connection that is not yet open."""
        parts = urlsplit(self.access.server)
        host = parts.hostname or ""
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                host, parts.port, timeout=self.timeout_seconds, context=self.access.tls
            )
        return http.client.HTTPConnection(host, parts.port, timeout=self.timeout_seconds)

    def target(self, path: str, query: Mapping[str, str] | Sequence[tuple[str, str]] | None) -> str:
        return f"{urlsplit(self.access.server).path}{path}{'?' + urlencode(query) if query else ''}"

    def authorization(self) -> dict[str, str]:
        """The header that says who we are.

        Raises:
            SandboxFailure: the token's file cannot be read (CR0331).
        """
        try:
            token = self.access.token()
        except OSError as error:
            raise failure("CR0331", f"the token for the cluster cannot be read: {error}.") from error
        return {"Authorization": f"Bearer {token}"} if token else {}

    def gone(self, error: Exception) -> SandboxFailure:
        why = "it does not answer in time" if isinstance(error, TimeoutError) else str(error) or "it hung up"
        return failure("CR0331", f"the cluster cannot be asked: {why[:300]}.", self.access.server)


class _RetryableError(Exception):
    def __init__(self, problem: Exception, after_seconds: float = 0.0) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.after_seconds = after_seconds


def refusal_of(status: int, text: bytes) -> ApiRefusal:
    """The server's ``Status``, or the text of whoever answered in its place."""
    try:
        found = json.loads(text)
        reason, message = str(found.get("reason") or ""), str(found.get("message") or "")
    except (ValueError, AttributeError):
        reason, message = "", text.decode(errors="replace")
    return ApiRefusal(status, reason, " ".join(message.split())[:500].rstrip(".") or "no reason given")


def _retry_after(value: str | None) -> float:
    """Seconds; a date, which API servers do not send, counts as none."""
    try:
        return max(0.0, float(value or 0))
    except ValueError:
        return 0.0
