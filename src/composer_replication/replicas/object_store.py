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
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from composer_replication.errors import ComposerError
from composer_replication.replicas.replica_errors import creates_twice, unreachable

T = TypeVar("T")
SCHEMES = ("s3", "gs", "az", "file", "memory")
_RETRY_PAUSE_SECONDS = 0.5


class ObjectStore:
    """Over one of ``obstore.store``, or what has its methods; keys have slashes.

    ``address``, without secrets, and what it is ``called`` are for messages. ``num_bytes`` counts payload bytes by ``sent/KIND``
    and ``received/KIND``, and ``requests``.
    """

    def __init__(
        self, store: Any, address: str, *, patience_seconds: float = 60.0, called: str = "the object store"
    ) -> None:
        self._store, self.address, self._called = store, address, called
        self.patience_seconds = patience_seconds
        self.num_bytes: Counter[str] = Counter()

    def create(self, key: str, data: bytes, *, kind: str = "records") -> bool:
        """Whether ``key`` now holds ``data``; False where it holds something else."""
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
        """What ``key`` holds; None where it is not there."""
        data = self._patiently(lambda: self._get(key))
        self.num_bytes[f"received/{kind}"] += len(data or b"")
        return data

    def names(self, prefix: str) -> list[str]:
        """Sorted keys under the folder ``prefix``, without it."""
        batches = self._patiently(lambda: list(self._store.list(f"{prefix}/")))
        return sorted(meta["path"].removeprefix(f"{prefix}/") for batch in batches for meta in batch)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove them; one that is gone already is no error."""

        def remove(key: str) -> None:
            with suppress(FileNotFoundError):
                self._store.delete(key)

        for key in keys:
            self._patiently(partial(remove, key))

    def probe(self) -> None:
        """Write, create twice and read, before anything depends on it (CR1101)."""
        key = f"probe/{secrets.token_hex(8)}"
        once = ObjectStore(self._store, self.address, patience_seconds=0.0)
        is_first, is_second = once.create(key, b"first"), once.create(key, b"second")
        found = once.read(key)
        once.delete([key])
        if not is_first or is_second or found != b"first":
            raise creates_twice(self.address)

    def _get(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.get(key).bytes())
        except FileNotFoundError:
            return None

    def _patiently(self, request: Callable[[], T]) -> T:
        """Any error of the store or of the network is tried again; the last one is raised as ours (CR1101)."""
        give_up_at = time.monotonic() + self.patience_seconds
        while True:
            self.num_bytes["requests"] += 1
            try:
                return request()
            except Exception as error:
                if isinstance(error, (ComposerError, TypeError, AttributeError, NameError)):
                    raise  # ours
                if time.monotonic() >= give_up_at:
                    raise unreachable(self._called, error, where=self.address) from error
            time.sleep(_RETRY_PAUSE_SECONDS)


def open_store(address: str, *, patience_seconds: float = 60.0) -> ObjectStore:
    """The store at an address such as ``s3://bucket/run-7``; credentials come from the environment alone.

    ``AWS_*``, ``GOOGLE_*`` and ``AZURE_*`` are read as their own tools read them. ``AWS_ENDPOINT_URL`` with ``http://`` is
    allowed, for a store on one's own network. What cannot be set up is refused (CR1101).
    """
    from obstore.store import from_url

    parts = urlsplit(address)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    problem = "" if parts.scheme in SCHEMES else f"{parts.scheme!r} is none of {', '.join(SCHEMES)}"
    if "@" in parts.netloc or parts.query:
        problem = "the address holds credentials or options"
    if problem:
        raise unreachable("the object store", problem, where=shown)
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
        return ObjectStore(from_url(address, **options), shown, patience_seconds=patience_seconds)
    except Exception as error:
        raise unreachable("the object store", error, where=shown) from error
