"""Fetching tells how far it is, against an index of our own."""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from composer_replication.errors import InputError
from composer_replication.tasks.intake import index
from composer_replication.tasks.intake.refusals import open_sources

FILES = {
    "pyproject.toml": '[project]\nname = "tinything"\nversion = "1.0"\n',
    "tinything.py": "def f():\n    return 1\n",
    "test_tinything.py": "def test_f():\n    pass\n",
}


def write_archive(path: Path) -> None:
    with tarfile.open(path, mode="w:gz") as archive:
        for name, text in FILES.items():
            info = tarfile.TarInfo(f"tinything-1.0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))


class SlowIndex(SimpleHTTPRequestHandler):
    """Gives the archive once ``may_answer`` is set."""

    may_answer: threading.Event

    def do_GET(self) -> None:
        if self.path.endswith(".gz"):
            self.may_answer.wait()
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name of the base class
        """Say nothing."""


@pytest.fixture
def may_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An index on this machine whose archive comes when the event is set."""
    folder = tmp_path / "index"
    page = folder / "tinything"
    page.mkdir(parents=True)
    write_archive(page / "tinything-1.0.tar.gz")
    digest = hashlib.sha256((page / "tinything-1.0.tar.gz").read_bytes()).hexdigest()
    link = f'<a href="tinything-1.0.tar.gz#sha256={digest}">tinything-1.0.tar.gz</a>'
    (page / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    event = threading.Event()
    handler = functools.partial(type("Handler", (SlowIndex,), {"may_answer": event}), directory=str(folder))
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
        index.index_settings.cache_clear()
        yield event
        event.set()
        server.shutdown()
        thread.join()
    index.index_settings.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    root = tmp_path / "mine"
    root.mkdir()
    for name, text in FILES.items():
        (root / name).write_text(text)
    return str(root)


def test_each_source_is_reported_when_it_is_there(may_answer: threading.Event, folder: str) -> None:
    told: list[tuple[int, int, str]] = []

    def tell(*step: object) -> None:
        told.append(step)  # type: ignore[arg-type]
        may_answer.set()  # the folder is read; the archive comes only now

    opened, refused = open_sources([folder, "sdist:tinything==1.0"], 2, tell)
    assert (len(opened), refused) == (2, {})
    assert told == [(1, 2, "sources"), (2, 2, "sources")]
    with pytest.raises(InputError, match="CR0402"):
        open_sources([f"{folder}/nothing"], 1)


def test_nobody_need_listen(folder: str) -> None:
    assert len(open_sources([folder], 1)[0]) == 1
