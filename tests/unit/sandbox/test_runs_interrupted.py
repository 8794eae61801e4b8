"""An interruption ends runs in other threads, as a failure of the sandbox and never as a result."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from composer_replication.errors import SandboxFailure
from composer_replication.records import SandboxSpec
from composer_replication.sandbox import open_sandbox, runs_interrupted
from composer_replication.sandbox.process_tree import descendants
from composer_replication.sandbox.supervised_run import interruptible_pool, is_interrupted


def test_a_run_in_another_thread_is_killed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()

    def run(seconds: str) -> int:
        with open_sandbox(SandboxSpec(tree)) as sandbox:
            return sandbox.exec(
                ["/bin/sh", "-c", f"touch started; sleep {seconds}"], timeout_seconds=100
            ).exit_code

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, "90")
        while not (tree / "started").exists() and not future.done():
            time.sleep(0.02)
        jailed = descendants(os.getpid())
        with runs_interrupted():
            with pytest.raises(SandboxFailure, match="program was interrupted"):
                future.result(timeout=300)
            with pytest.raises(SandboxFailure, match="program was interrupted"):  # in the middle of its start
                run("0")
        assert jailed
        assert not set(jailed) & set(descendants(os.getpid()))
        assert pool.submit(run, "0").result(timeout=300) == 0


def test_an_interruption_within_another_one_does_not_end_it() -> None:
    with runs_interrupted():
        with runs_interrupted():
            assert is_interrupted()
        assert is_interrupted()
    assert not is_interrupted()


@pytest.mark.parametrize(("error", "tells"), [(KeyboardInterrupt, True), (ValueError, False)])
def test_an_error_ends_the_pool(error: type[BaseException], tells: bool) -> None:
    begun, told, later = Event(), [], []

    def first() -> None:
        begun.set()
        deadline = time.monotonic() + 1
        while not is_interrupted() and time.monotonic() < deadline:
            time.sleep(0.01)
        told.append(is_interrupted())

    def run() -> None:
        with interruptible_pool(0, "test") as pool:
            pool.submit(first)
            pool.submit(later.append, 1)
            begun.wait()
            raise error

    with pytest.raises(error):
        run()
    assert (told, later) == ([tells], [])
    assert not is_interrupted()
