"""The object store's protocol against real S3 servers: moto refuses a second create, nanio and s3rver do not; nanio and s3rver check
signatures.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from composer_replication.config import ReplicasSection
from composer_replication.errors import MissingError, UsageError
from composer_replication.replicas.object_store import ObjectStore, open_store
from composer_replication.replicas.rounds import Merge
from composer_replication.replicas.store_rounds import StoreRounds

# As moto_server, without its threads: it looks whether a key is there and writes it in two steps, so that on a busy machine two threads
# may both create it.
MOTO = """
import sys
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
application = DomainDispatcherApplication(create_backend_app)
run_simple("127.0.0.1", int(sys.argv[1]), application, request_handler=MotoRequestHandler)
"""
KEY, SECRET = "replica-tests", "replica-tests-secret"


@contextmanager
def served(*command: str, port: int, key: str = KEY, secret: str = SECRET) -> Iterator[str]:
    """A server as a process of its own, until the block ends; its bucket ``bucket`` is there."""
    server = subprocess.Popen(
        command,
        env={**os.environ, "NANIO_ACCESS_KEY": KEY, "NANIO_SECRET_KEY": SECRET},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        give_up_at = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < give_up_at
                time.sleep(0.2)
        client = boto3.client(
            "s3",
            endpoint_url=address,
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )
        client.create_bucket(Bucket="bucket")
        yield address
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    port = free_port()
    with served(sys.executable, "-c", MOTO, str(port), port=port) as address:
        yield address


@pytest.fixture(scope="module")
def nanio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, folder = free_port(), tmp_path_factory.mktemp("nanio")
    words = ("nanio", "serve", "--host", "127.0.0.1", "--port", str(port), "--data-dir", str(folder))
    with served(sys.executable, "-m", *words, port=port) as address:
        yield address


@pytest.fixture(scope="module")
def s3rver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("npm") is None:
        pytest.skip("npm, which brings s3rver, is not here")
    port, folder = free_port(), tmp_path_factory.mktemp("s3rver")
    install = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "s3rver@3.7.1"]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    program, data = folder / "node_modules" / "s3rver" / "bin" / "s3rver.js", folder / "data"
    words = ("node", str(program), "--address", "127.0.0.1", "--port", str(port), "--directory", str(data))
    with served(*words, port=port, key="S3RVER", secret="S3RVER") as address:
        yield address


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ObjectStore]:
    """A store at a server, with credentials in the environment as a user gives them."""

    def opened(server: str, path: str = "bucket/run", secret: str = SECRET, key: str = KEY) -> ObjectStore:
        for name, value in {
            "AWS_ENDPOINT_URL": server,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        return open_store(f"s3://{path}", patience_seconds=5.0)

    return opened


def together(*works: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        results[place] = works[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_exactly_one_of_eight_wins_in_each_of_fifty_races(moto: str, at: Callable[..., ObjectStore]) -> None:
    stores = [at(moto, "bucket/races") for _ in range(8)]
    winners = [
        together(
            *(
                lambda s=store, n=n, r=race: s.create(f"race/{r}", bytes([n]))
                for n, store in enumerate(stores)
            )
        )
        for race in range(50)
    ]
    assert [won.count(True) for won in winners] == [1] * 50
    for race, won in enumerate(winners):
        assert stores[0].read(f"race/{race}") == bytes([won.index(True)])


def test_a_store_that_refuses_a_second_create_is_taken(moto: str, at: Callable[..., ObjectStore]) -> None:
    store = at(moto)
    store.probe()
    assert store.names("probe") == []


def test_two_replicas_agree_over_s3(moto: str, at: Callable[..., ObjectStore]) -> None:
    """Six rounds with a state every second one; what both merge is the same, and garbage is gone."""

    def replica(number: int) -> Callable[[], list[tuple[Any, ...]]]:
        options = ReplicasSection(transport="s3://bucket/two", deadline_seconds=30)
        store = at(moto, "bucket/two")
        rounds = StoreRounds(store, options, replica=number, poll_seconds=0.05, state_every=2)

        def run() -> list[tuple[Any, ...]]:
            merged: list[tuple[Any, ...]] = []
            rounds.join({"recipe": "a"}, lambda: b"state %d" % len(merged))
            for round_idx in range(6):
                rounds.offer(
                    round_idx,
                    b"%d-%d" % (number, round_idx),
                    tokens=number + 1,
                    fingerprint=f"{round_idx:016d}",
                )
                merge = rounds.collect(round_idx)
                assert isinstance(merge, Merge)
                merged.append(tuple(sorted((c.replica, c.tokens, c.payload) for c in merge.contributions)))
                rounds.after_merge(round_idx + 1)
            rounds.close()
            return merged

        return run

    one, other = together(replica(0), replica(1))
    assert one == other
    assert one == [((0, 1, b"0-%d" % n), (1, 2, b"1-%d" % n)) for n in range(6)]
    view = at(moto, "bucket/two")
    assert {name[:8] for name in view.names("state")} == {"00000004", "00000006"}
    assert len([name for name in view.names("round") if "/offer-" in name]) == 4


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("server", "key", "secret"), [("nanio", KEY, SECRET), ("s3rver", "S3RVER", "S3RVER")]
)
def test_a_store_that_lets_a_key_be_created_twice_is_refused(
    request: pytest.FixtureRequest, at: Callable[..., ObjectStore], server: str, key: str, secret: str
) -> None:
    with pytest.raises(UsageError, match="CR1101"):
        at(request.getfixturevalue(server), key=key, secret=secret).probe()


@pytest.mark.parametrize(("path", "secret"), [("bucket/run", "wrong"), ("no-such-bucket/run", SECRET)])
def test_a_wrong_secret_and_a_bucket_that_is_not_there(
    nanio: str, at: Callable[..., ObjectStore], path: str, secret: str
) -> None:
    with pytest.raises(MissingError) as caught:
        at(nanio, path, secret).probe()
    assert caught.value.code == "CR1101"
    assert SECRET not in str(caught.value)


def test_no_such_bucket_and_nobody_there(moto: str, at: Callable[..., ObjectStore]) -> None:
    for server, path in ((moto, "no-such-bucket/run"), (f"http://127.0.0.1:{free_port()}", "bucket/run")):
        with pytest.raises(MissingError, match="CR1101"):
            at(server, path).probe()


def test_the_protocol_needs_no_torch() -> None:
    """Replicas' records can be looked at where nothing is trained."""
    assert not {"torch", "transformers"} & {Path(str(name)).name for name in sys.modules}
