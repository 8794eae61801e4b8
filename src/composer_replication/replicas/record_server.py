"""Records over HTTP with one shared token: an object store of one process, for replicas on one network.

    PUT /KEY     201: created, or there already with these very bytes; 409: it holds something else
    GET /KEY     200 with the bytes, or 404
    GET /KEY/    200 with a JSON list of what is under it

Every answer carries the sha256 of its bytes, and every request the token, which is compared in constant time. Nothing
that arrives is ever unpickled or run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from composer_replication.replicas.object_store import ObjectStore
from composer_replication.replicas.replica_errors import damaged, unreachable

_MOST_BYTES_OF_A_RECORD = 2**20


def records_address(lighthouse: str) -> tuple[str, int]:
    """Where the records of the lighthouse at HOST:PORT are: at the next port (CR1101: no such address)."""
    host, _, port = lighthouse.rpartition(":")
    if not host or not port.isdecimal():
        raise unreachable("the lighthouse", f"{lighthouse!r} is not HOST:PORT", where="replicas.transport")
    return host, int(port) + 1


class RecordServer:
    """Serves what is in ``store`` until it is closed; others may create there only where it ``takes_records``.

    Port 0 is any that is free.
    """

    def __init__(
        self,
        token: str,
        store: ObjectStore,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        takes_records: bool = False,
    ) -> None:
        if not token:
            raise ValueError("a record server needs a token")
        self.store = store
        self._server = ThreadingHTTPServer((host, port), _handler(self, token, takes_records=takes_records))
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(owner: RecordServer, token: str, *, takes_records: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 60

        def do_GET(self) -> None:
            status, data = self._outcome(self.path.removeprefix("/"), owner.store)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Sha256", hashlib.sha256(data).hexdigest())
            self.end_headers()
            self.wfile.write(data)

        do_PUT = do_GET

        def _outcome(self, key: str, store: ObjectStore) -> tuple[int, bytes]:
            offered = self.headers.get("Authorization", "")
            if not hmac.compare_digest(offered.encode(), f"Bearer {token}".encode()):
                return 401, b""
            if self.command == "GET":
                data = json.dumps(store.names(key[:-1])).encode() if key.endswith("/") else store.read(key)
                return (404, b"") if data is None else (200, data)
            length = int(self.headers.get("Content-Length") or 0)
            if not takes_records or length > _MOST_BYTES_OF_A_RECORD:
                return 405, b""
            return (201 if store.create(key, self.rfile.read(length)) else 409), b""

        def log_message(self, *_: object) -> None:
            """Nothing: a server of ours is silent."""

    return Handler


def open_records(address: str, token: str, *, patience_seconds: float = 60.0) -> ObjectStore:
    """The store that a ``RecordServer`` at ``http://HOST:PORT`` serves; nothing can be deleted there."""
    called = "the lighthouse or another replica"
    return ObjectStore(_Served(address, token), address, patience_seconds=patience_seconds, called=called)


class _Found(bytes):
    """As ``obstore`` gives what it has read."""

    def bytes(self) -> bytes:
        return self


class _Served:
    """What an ``ObjectStore`` asks of ``obstore``, over HTTP."""

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def put(self, key: str, data: bytes, **_: object) -> None:
        if self._ask("PUT", key, data) is None:
            raise FileExistsError(key)

    def get(self, key: str) -> _Found:
        found = self._ask("GET", key)
        if found is None:
            raise FileNotFoundError(key)
        return _Found(found)

    def list(self, prefix: str) -> list[list[dict[str, str]]]:
        return [[{"path": prefix + name} for name in json.loads(self.get(prefix))]]

    def _ask(self, method: str, key: str, data: bytes | None = None) -> bytes | None:
        request = urllib.request.Request(  # noqa: S310 - http, and the address is the run's own
            f"{self._address}/{key}",
            data=data,
            method=method,
            headers={"Authorization": f"Bearer {self._token}"},
        )
        try:
            with self._opener.open(request, timeout=30) as answer:
                body: bytes = answer.read()
        except urllib.error.HTTPError as error:
            if error.code in {404, 409}:
                return None
            said = "the token is wrong" if error.code == 401 else f"HTTP {error.code}"
            raise unreachable("the lighthouse or another replica", said, where=self._address) from error
        if hashlib.sha256(body).hexdigest() != answer.headers.get("X-Sha256"):
            raise damaged("what another replica sent is not what it says it is")
        return body
