"""Records over HTTP with one shared token: a ``Store`` in the memory of one process, for replicas on one network.

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
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from composer_replication.replicas.replica_errors import damaged, unreachable
from composer_replication.run_folder import write_atomic

_MOST_BYTES_OF_A_RECORD = 2**20
_PAUSE_SECONDS = 0.5


class RecordServer:
    """Serves ``records`` until it is closed.

    Others may create only where it ``takes_records``; in ``folder`` those outlive this process. Port 0 is any that is free.
    """

    def __init__(
        self,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        takes_records: bool = False,
        folder: Path | None = None,
    ) -> None:
        if not token:
            raise ValueError("a record server needs a token")
        self._folder = folder
        self.records = {} if folder is None else _kept(folder)
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer((host, port), _handler(self, token, takes_records=takes_records))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.address = f"http://{host}:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def create(self, key: str, data: bytes) -> bool:
        """Whether ``key`` holds ``data`` now; kept before anybody is told."""
        with self.lock:
            if key not in self.records and self._folder is not None:
                write_atomic(self._folder / key.encode().hex(), data)
            return self.records.setdefault(key, data) == data

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(owner: RecordServer, token: str, *, takes_records: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 60

        def do_GET(self) -> None:
            if not self._is_allowed():
                return
            key = self.path.removeprefix("/")
            with owner.lock:
                listed = sorted(name.removeprefix(key) for name in owner.records if name.startswith(key))
                data = json.dumps(listed).encode() if key.endswith("/") else owner.records.get(key)
            self._answer(404 if data is None else 200, data or b"")

        def do_PUT(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if not self._is_allowed():
                return
            if not takes_records or length > _MOST_BYTES_OF_A_RECORD:
                self._answer(405, b"")
                return
            data = self.rfile.read(length)
            self._answer(201 if owner.create(self.path.removeprefix("/"), data) else 409, b"")

        def _is_allowed(self) -> bool:
            offered = self.headers.get("Authorization", "")
            is_allowed = hmac.compare_digest(offered.encode(), f"Bearer {token}".encode())
            if not is_allowed:
                self.close_connection = True
                self._answer(401, b"")
            return is_allowed

        def _answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Sha256", hashlib.sha256(data).hexdigest())
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing: a server of ours is silent."""

    return Handler


def _kept(folder: Path) -> dict[str, bytes]:
    names = [path for path in folder.glob("*") if not path.name.startswith(".")] if folder.is_dir() else []
    return {bytes.fromhex(path.name).decode(): path.read_bytes() for path in names}


class RecordClient:
    """A ``Store`` at a ``RecordServer``, ``http://HOST:PORT``."""

    def __init__(self, address: str, token: str, *, patience_seconds: float = 60.0) -> None:
        self.address = address
        self.patience_seconds = patience_seconds
        self._token = token
        self.num_bytes: Counter[str] = Counter()

    def create(self, key: str, data: bytes, *, kind: str = "records") -> bool:
        self.num_bytes[f"sent/{kind}"] += len(data)
        return self._ask("PUT", key, data)[0] == 201

    def read(self, key: str, *, kind: str = "records") -> bytes | None:
        status, data = self._ask("GET", key)
        self.num_bytes[f"received/{kind}"] += len(data)
        return data if status == 200 else None

    def names(self, prefix: str) -> list[str]:
        found: list[str] = json.loads(self._ask("GET", f"{prefix}/")[1])
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Records are few and small here, and go with the server."""

    def _ask(self, method: str, key: str, data: bytes | None = None) -> tuple[int, bytes]:
        give_up_at = time.monotonic() + self.patience_seconds
        while True:
            try:
                return self._ask_once(method, key, data)
            except (OSError, EOFError) as error:
                if time.monotonic() >= give_up_at:
                    raise unreachable(
                        "the lighthouse or another replica", error, where=self.address
                    ) from error
            time.sleep(_PAUSE_SECONDS)

    def _ask_once(self, method: str, key: str, data: bytes | None) -> tuple[int, bytes]:
        request = urllib.request.Request(  # noqa: S310 - http, and the address is the run's own
            f"{self.address}/{key}",
            data=data,
            method=method,
            headers={"Authorization": f"Bearer {self._token}"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as answer:
                body, status, sha = answer.read(), answer.status, answer.headers.get("X-Sha256")
        except urllib.error.HTTPError as error:
            if error.code not in {404, 409}:
                said = "the token is wrong" if error.code == 401 else f"HTTP {error.code}"
                raise unreachable("the lighthouse or another replica", said, where=self.address) from error
            return error.code, b""
        if hashlib.sha256(body).hexdigest() != sha:
            raise damaged("what another replica sent is not what it says it is")
        return int(status), body
