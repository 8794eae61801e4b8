"""Records over HTTP: created once, read by token and hash only."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from composer_replication.errors import InputError, MissingError
from composer_replication.replicas.object_store import ObjectStore, open_store
from composer_replication.replicas.record_server import RecordServer, open_records


def client(server: RecordServer, token: str = "right") -> ObjectStore:
    return open_records(server.address, token, patience_seconds=0.0)


def served(**options: bool) -> closing[RecordServer]:
    return closing(RecordServer("right", open_store("memory:///"), **options))


def test_records_are_created_once_and_listed() -> None:
    with served(takes_records=True) as server:
        one, other = client(server), client(server)
        assert one.create("lease/0-0", b"a")
        assert one.create("lease/0-0", b"a")
        assert not other.create("lease/0-0", b"b")
        assert other.read("lease/0-0") == b"a"
        assert other.read("lease/9") is None
        assert other.names("lease") == ["0-0"]
        assert other.num_bytes["sent/records"] == 1


@pytest.mark.parametrize(
    "ask", [lambda c: c.read("a"), lambda c: c.names("a"), lambda c: c.create("a", b"2")]
)
def test_a_wrong_token_gets_nothing(ask: object) -> None:
    assert callable(ask)
    with served(takes_records=True) as server:
        server.store.create("a", b"1")
        with pytest.raises(MissingError, match="the token is wrong") as caught:
            ask(client(server, "wrong"))
        assert caught.value.code == "CR1101"
        assert (server.store.read("a"), server.store.read("a/b")) == (b"1", None)


def test_there_is_no_server_without_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        RecordServer("", open_store("memory:///"))


def test_a_healing_server_takes_nothing() -> None:
    with served() as server:
        with pytest.raises(MissingError, match="405"):
            client(server).create("a", b"1")
        assert server.store.read("a") is None


def test_bytes_that_are_not_what_they_say_are_refused() -> None:
    """A server of somebody else's, whose hash is that of other bytes."""

    class Lying(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.send_header("X-Sha256", "0" * 64)
            self.end_headers()
            self.wfile.write(b"1")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Lying)
    threading.Thread(target=server.handle_request, daemon=True).start()
    with pytest.raises(InputError) as caught:
        open_records(f"http://127.0.0.1:{server.server_address[1]}", "right", patience_seconds=0.0).read("a")
    server.server_close()
    assert caught.value.code == "CR1107"


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(MissingError) as caught:
        open_records(address, "right", patience_seconds=0.0).read("a")
    assert caught.value.code == "CR1101"
