"""An object store as the replicas need it: create if absent, read, list, delete; every payload byte counted.

Objects are never changed, so a message that comes late or twice does no harm. A request that fails is tried again for
``patience_seconds``. A create that was answered by "exists" is compared with what is there: an earlier try of ours may
have arrived although its answer was lost.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from composer_replication.replicas.replica_errors import creates_twice, unreachable

T = TypeVar("T")
SCHEMES = ("s3", "gs", "az", "file", "memory")
_RETRY_PAUSE_SECONDS = 0.5


class Store(Protocol):
    """What the protocol asks of a place for records; keys have slashes."""

    address: str
    num_bytes: Counter[str]

    def create(self, key: str, data: bytes, *, kind: str = "records") -> bool:
        """Whether ``key`` now holds ``data``; False where it holds something else."""

    def read(self, key: str, *, kind: str = "records") -> bytes | None:
        """What ``key`` holds; None where it is not there."""

    def names(self, prefix: str) -> list[str]:
        """Sorted keys under the folder ``prefix``, without it."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove them; one that is gone already is no error."""


class ObjectStore:
    """A ``Store`` over one of ``obstore.store``; ``address`` is for messages, without secrets.

    ``num_bytes`` counts payload bytes by ``sent/KIND`` and ``received/KIND``, and ``requests``.
    """

    def __init__(self, store: Any, *, address: str, patience_seconds: float = 60.0) -> None:
        self._store = store
        self.address = address
        self.patience_seconds = patience_seconds
        self.num_bytes: Counter[str] = Counter()

    def create(self, key: str, data: bytes, *, kind: str = "records") -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def put() -> bool:
            try:
                self._store.put(key, data, mode="create")
            except (AlreadyExistsError, PreconditionError, FileExistsError):
                return self._get(key) == data
            return True

        self.num_bytes[f"sent/{kind}"] += len(data)
        return self._patiently(put)

    def read(self, key: str, *, kind: str = "records") -> bytes | None:
        data = self._patiently(lambda: self._get(key))
        self.num_bytes[f"received/{kind}"] += len(data or b"")
        return data

    def names(self, prefix: str) -> list[str]:
        def listed() -> list[str]:
            found = [meta["path"] for batch in self._store.list(f"{prefix}/") for meta in batch]
            return sorted(path.removeprefix(f"{prefix}/") for path in found)

        return self._patiently(listed)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._patiently(lambda key=key: self._remove(key))  # type: ignore[misc]

    def probe(self) -> None:
        """Write, create twice and read, before anything depends on it (CR1101, CR1102)."""
        key = f"probe/{secrets.token_hex(8)}"
        patience, self.patience_seconds = self.patience_seconds, 0.0
        try:
            is_first = self.create(key, b"first")
            is_second = self.create(key, b"second")
            found = self.read(key)
            self.delete([key])
        finally:
            self.patience_seconds = patience
        if not is_first or is_second or found != b"first":
            raise creates_twice(self.address)

    def _get(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.get(key).bytes())
        except FileNotFoundError:
            return None

    def _remove(self, key: str) -> None:
        try:
            self._store.delete(key)
        except FileNotFoundError:
            return

    def _patiently(self, request: Callable[[], T]) -> T:
        """Any error of the store or of the network is tried again; the last one is raised as ours (CR1101)."""
        give_up_at = time.monotonic() + self.patience_seconds
        while True:
            self.num_bytes["requests"] += 1
            try:
                return request()
            except Exception as error:
                if isinstance(error, (TypeError, AttributeError, NameError)):
                    raise  # ours
                if time.monotonic() >= give_up_at:
                    raise unreachable("the object store", error, where=self.address) from error
            time.sleep(_RETRY_PAUSE_SECONDS)


def open_store(address: str, *, patience_seconds: float = 60.0) -> ObjectStore:
    """The store at an address such as ``s3://bucket/run-7``; credentials come from the environment alone.

    ``AWS_*``, ``GOOGLE_*`` and ``AZURE_*`` are read as their own tools read them. ``AWS_ENDPOINT_URL`` with ``http://`` is
    allowed, for a store on one's own network. What cannot be set up is refused (CR1101).
    """
    from obstore.store import from_url

    parts = urlsplit(address)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.scheme not in SCHEMES:
        raise unreachable(
            "the object store", f"{parts.scheme!r} is none of {', '.join(SCHEMES)}", where=shown
        )
    if "@" in parts.netloc or parts.query:
        raise unreachable("the object store", "the address holds credentials or options", where=shown)
    options: dict[str, Any] = {}
    if parts.scheme == "file":
        options["mkdir"] = True
    elif parts.scheme != "memory":
        options["retry_config"] = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
        options["client_options"] = {
            "timeout": timedelta(seconds=60),
            "connect_timeout": timedelta(seconds=5),
            "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
        }
    try:
        return ObjectStore(from_url(address, **options), address=shown, patience_seconds=patience_seconds)
    except Exception as error:
        if isinstance(error, ImportError):
            raise
        raise unreachable("the object store", error, where=shown) from error
