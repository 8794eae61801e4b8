"""Git over https and ssh against servers of our own: what is reached, what is refused, and that nothing ever waits."""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from small_trees import commit_all, write_tree

from composer_replication.errors import InputError
from composer_replication.tasks.intake import git_source
from composer_replication.tasks.intake.sources import open_source

FILES = {
    "pyproject.toml": '[project]\nname = "thing"\nversion = "2.1"\n',
    "thing.py": "def f():\n    return 1\n",
    "tests/test_thing.py": "def test_f():\n    pass\n",
}


@pytest.fixture(autouse=True)
def _own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; everything below ``private`` wants a password."""

    def do_GET(self) -> None:
        if self.path.startswith("/private"):
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="planted"')
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name of the base class
        """Say nothing."""


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A bare repository that plain files over https can give."""
    work, bare = tmp_path / "work", tmp_path / "served" / "thing.git"
    write_tree(work, FILES)
    commit_all(work)
    subprocess.run(["git", "-C", str(work), "tag", "v1"], check=True, capture_output=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(work), str(bare)], check=True, capture_output=True)
    subprocess.run(["git", "-C", str(bare), "update-server-info"], check=True, capture_output=True)
    return bare


@pytest.fixture
def https(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with a certificate of its own, which git is told to trust."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("GIT_SSL_CAINFO", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(served.parent)))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@contextlib.contextmanager
def listening(*, closes: bool) -> Iterator[int]:
    """A port that takes connections and closes them, or never says a word."""
    server = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                if closes:
                    connection.close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    for connection in kept:
        connection.close()


def error_of(source: str) -> InputError:
    with pytest.raises(InputError) as caught:
        open_source(source)
    assert caught.value.where == source
    return caught.value


def test_a_repository_over_https(https: str) -> None:
    found = open_source(f"git+{https}/thing.git@v1")
    assert (found.name, found.version) == ("thing", "2.1")
    assert {name: data.decode() for name, data in found.files.items() if ".dist-info" not in name} == FILES


def test_https_tells_unknown_from_absent_and_private(https: str) -> None:
    unknown = error_of(f"git+{https}/thing.git@v9")
    assert (unknown.code, unknown.message) == ("CR0407", "the repository has nothing called v9.")
    private = error_of(f"git+{https}/private/thing.git@v1")
    assert private.code == "CR0407"
    assert "clone it yourself" in private.fix
    absent = error_of(f"git+{https}/absent.git@v1")
    assert (absent.code, absent.message) == ("CR0407", "git cannot reach the repository.")


@pytest.mark.parametrize("scheme", ["https", "ssh"])
def test_a_server_that_hangs_up(scheme: str) -> None:
    with listening(closes=True) as port:
        error = error_of(f"git+{scheme}://127.0.0.1:{port}/o/thing.git@v1")
    assert (error.code, error.message) == ("CR0407", "git cannot reach the repository.")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
@pytest.mark.parametrize("scheme", ["https", "ssh"])
def test_a_server_that_never_answers(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git_source, "_ASK_SECONDS", 2.0)
    with listening(closes=False) as port:
        error = error_of(f"git+{scheme}://127.0.0.1:{port}/o/thing.git@v1")
    assert (error.code, error.message) == ("CR0407", "git cannot reach the repository in time.")


def test_ssh_may_ask_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of ssh keeps how it was called."""
    program, words = tmp_path / "bin" / "ssh", tmp_path / "words"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> "{words}"\nexit 255\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    error = error_of("git@127.0.0.1:o/thing.git@v1")
    assert error.code == "CR0407"
    assert error.message == "git cannot reach the repository."
    assert "-oBatchMode=yes" in words.read_text()
