"""What a person can do wrong with ``serve-env``. That it serves is shown by tests/interop/openenv, with the real library."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_replication.errors import UsageError
from composer_replication.rollouts.environment.hosted_attempt import listen, url_of
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore

Answer = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def empty_store(tmp_path: Path) -> Path:
    return TaskStore.create(tmp_path / "empty").root


@pytest.fixture(scope="module")
def store(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("served") / "tasks", ("tinymath/numbers.py::sign",))


def refusal(answer: Answer, *words: str) -> tuple[int, str, str]:
    """Exit code, error code, and the next step."""
    code, result = answer("serve-env", *words)
    return code, result["error"]["code"], result["error"]["fix"]


def test_a_store_that_is_not_there(tmp_path: Path, answer: Answer) -> None:
    code, error, fix = refusal(answer, str(tmp_path / "gone"), "--port", "0")
    assert (code, error) == (4, "CR0411") and fix


def test_a_store_without_tasks(empty_store: Path, answer: Answer) -> None:
    code, error, fix = refusal(answer, str(empty_store), "--port", "0")
    assert (code, error) == (6, "CR0604") and "tasks build" in fix


def test_a_port_that_is_taken(store: Path, answer: Answer) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        code, error, fix = refusal(answer, str(store), "--port", port)
    assert (code, error) == (2, "CR0850") and "--port 0" in fix


@pytest.mark.parametrize(
    ("host", "port"),
    [("127.0.0.1", 70000), ("no such host", 0), ("nowhere.invalid", 0), ("a..b", 0), ("2001:db8::1", 0)],
)
def test_an_address_that_cannot_be_taken(host: str, port: int) -> None:
    with pytest.raises(UsageError, match="CR0850") as refused:
        listen(host, port)
    assert host in refused.value.message and "while attempting" not in refused.value.message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-sessions", "0"], "CR0206"),
        (["--max-sessions", "5000"], "CR0206"),
        (["--session-seconds", "0"], "CR0206"),
        (["--max-calls", "0"], "CR0206"),
        (["--grading-jobs", "0"], "CR0206"),
        (["--max-sessions", "many"], "CR0206"),
        (["--backend", "nonsense"], "CR0305"),
    ],
)
def test_numbers_and_names_that_make_no_sense(
    store: Path, words: list[str], expected: str, answer: Answer
) -> None:
    code, error, _ = refusal(answer, str(store), "--port", "0", *words)
    assert (code, error) == (2, expected)


def test_without_a_port(store: Path, answer: Answer) -> None:
    assert refusal(answer, str(store))[:2] == (2, "CR0206")


def test_the_extra_is_named_where_the_library_is_missing(store: Path, answer: Answer) -> None:
    assert importlib.util.find_spec("openenv") is None, "the pinned set has no place for it"
    code, error, fix = refusal(answer, str(store), "--port", "0")
    assert (code, error) == (3, "CR0101") and fix == "pip install 'composer-replication[openenv]'"


def test_ended_by_a_signal_it_stops_gradings(
    store: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    stopped = []
    real = Grader.stop_runs
    monkeypatch.setattr(Grader, "stop_runs", lambda grader: (stopped.append(grader), real(grader)))
    monkeypatch.setattr(Grader, "attempt_backend", lambda _: None)  # with its self-test
    library = SimpleNamespace(serve=lambda *_, **__: ("SIGTERM", Counter()))
    name = "composer_replication.rollouts.environment.openenv_server"
    monkeypatch.setitem(sys.modules, name, library)  # type: ignore[arg-type]
    code, result = answer("serve-env", store, "--port", "0")
    assert (code, len(stopped), result["signal"]) == (0, 1, "SIGTERM")


def test_port_0_is_a_free_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(UsageError, match="CR0850"):
            listen("127.0.0.1", port)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_an_address_of_the_newer_kind() -> None:
    if not os.access("/proc/net/if_inet6", os.R_OK) or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 address here")
    with listen("::1", 0) as listener:
        assert listener.family is socket.AF_INET6
        assert url_of(listener).startswith("http://[::1]:")
