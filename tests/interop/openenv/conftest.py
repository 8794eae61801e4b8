"""Servers of the store: real processes that are started by the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from served_process import PATIENCE_SECONDS, Server

from composer_replication.records import Task
from composer_replication.tasks.store import TaskStore


@pytest.fixture(scope="session")
def clamp(store: TaskStore) -> Task:
    return next(task for task in store.tasks() if task.symbol == "clamp")


@pytest.fixture(scope="session")
def serve(store: TaskStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers of the store, or of another folder; what a test leaves running is ended, and leaves nothing."""
    servers: list[Server] = []

    def start(*flags: str) -> Server:
        temporary = tmp_path_factory.mktemp("temporary")
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "composer_replication.cli.main", "serve-env", str(store.root)),
                *("--port", "0", "--json", *flags),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(temporary), "ENABLE_WEB_INTERFACE": "1"},
        )
        server = Server(process, temporary)
        servers.append(server)
        threading.Thread(target=server.listen, daemon=True).start()
        assert server.ready.wait(PATIENCE_SECONDS), "it says nothing"
        assert server.url, "".join(server.said)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end()
        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()
