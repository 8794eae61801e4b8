"""A pool lends each sandbox to one rollout at a time and makes it new in between."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composer_replication.errors import SandboxFailure, SandboxFileError
from composer_replication.records import Limits
from composer_replication.sandbox import base_python, held_jail, process_folder, warm_bubblewrap
from composer_replication.sandbox.pool import PooledSandbox, SandboxPool
from composer_replication.sandbox.process_tree import descendants
from composer_replication.sandbox.warm_bubblewrap import WarmBubblewrap

LONG = 60.0


@pytest.fixture
def pool() -> Iterator[SandboxPool]:
    check = WarmBubblewrap().is_available()
    if not check.ok:
        pytest.skip(f"not available here: {check.detail}")
    with SandboxPool(2, limits=Limits(num_processes=32)) as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "f").write_text("from the tree\n")
    return folder


def run(sandbox: PooledSandbox, command: str) -> str:
    done = sandbox.exec(command, timeout_seconds=LONG)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_what_is_taken_holds_the_tree_and_the_files(pool: SandboxPool, source: Path) -> None:
    with pool.take(source, {"inner/g": b"given\n"}) as sandbox:
        assert run(sandbox, "cat f inner/g; echo mine > f") == "from the tree\ngiven\n"
        assert sandbox.read_file("f") == b"mine\n"
    assert (source / "f").read_text() == "from the tree\n"


def test_the_next_rollout_finds_nothing_of_the_one_before(pool: SandboxPool, source: Path) -> None:
    """As many rollouts as make each sandbox serve several."""
    seen: list[tuple[str, str]] = []
    for number in range(5):
        with pool.take(source) as sandbox:
            found = run(
                sandbox, 'ls -A . "$HOME" "$TMPDIR" /dev/shm; env | grep LEFT; set -- /proc/[0-9]*; echo $#'
            )
            seen.append((str(sandbox.tree), found.replace(str(sandbox.tree.parent), "")))
            run(
                sandbox,
                f"echo {number} | tee left $HOME/left $TMPDIR/left /dev/shm/left /tmp/left; sleep 99 & true",
            )
    assert len({tree for tree, _ in seen}) <= 2
    lines = [line for line in seen[0][1].splitlines() if line and not line.endswith(":")]
    assert lines == ["f", "2"]  # the file of the tree; the first process and this shell
    assert all("left" not in found for _, found in seen)
    assert pool.replaced == []


def test_a_reset_without_giving_back(pool: SandboxPool, source: Path) -> None:
    with pool.take(source) as sandbox:
        run(sandbox, "echo x > left")
        sandbox.reset(source, {"g": b""})
        assert run(sandbox, "ls -A") == "f\ng\n"


def test_a_sandbox_that_was_given_back_answers_nothing(pool: SandboxPool) -> None:
    sandbox = pool.take()
    sandbox.close()
    sandbox.close()
    for ask in (
        lambda: sandbox.exec(["true"], timeout_seconds=LONG),
        sandbox.list_files,
        sandbox.snapshot,
        sandbox.reset,
        lambda: sandbox.read_file("f"),
        lambda: sandbox.write_file("f", b""),
        lambda: sandbox.restore("x"),
    ):
        with pytest.raises(SandboxFailure, match="given back") as error:
            ask()
        assert error.value.code == "CR0303"


def test_more_rollouts_than_sandboxes_wait(pool: SandboxPool) -> None:
    alive = threading.Semaphore(2)

    def rollout(number: int) -> str:
        with pool.take(files={"mine": str(number).encode()}) as sandbox:
            assert alive.acquire(blocking=False), "three were lent at once"
            try:
                return run(sandbox, "sleep 0.05; cat mine; ls -A | wc -l")
            finally:
                alive.release()

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(rollout, range(8))) == [f"{number}1\n" for number in range(8)]


def test_waiting_ends(pool: SandboxPool) -> None:
    with pool.take(), pool.take():
        with pytest.raises(SandboxFailure) as error:
            pool.take(timeout_seconds=0.05)
        assert error.value.code == "CR0312"
    with pool.take(timeout_seconds=LONG):
        pass


def test_a_survivor_costs_its_sandbox_the_place(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the reset cannot remove: the sandbox is destroyed, another comes, and the reason is kept."""
    with pool.take() as sandbox:
        first = sandbox.tree
        run(sandbox, "echo x > stays")
        with monkeypatch.context() as context:
            context.setattr(warm_bubblewrap, "empty", lambda folder: None)
            sandbox.close()
            while not pool.replaced:
                threading.Event().wait(0.01)
    assert len(pool.replaced) == 1
    assert "stays" in pool.replaced[0]
    with pool.take() as one, pool.take() as other:
        assert first not in (one.tree, other.tree)
        assert run(one, "ls -A") == run(other, "ls -A") == ""
    assert not first.exists()


def test_whatever_a_reset_raises_the_pool_keeps_its_size(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ValueError("of no kind that is known")

    monkeypatch.setattr(warm_bubblewrap.WarmBubblewrapSandbox, "reset", fail)
    trees = set()
    for _ in range(4):
        with pool.take(timeout_seconds=LONG) as sandbox:
            trees.add(sandbox.tree)
    assert len(trees) == 4
    assert "of no kind that is known" in pool.replaced[0]


def test_a_reset_that_fails_is_said_and_the_sandbox_goes_on(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool.take() as sandbox:
        with monkeypatch.context() as context:
            context.setattr(warm_bubblewrap, "empty", lambda folder: None)
            run(sandbox, "echo x > stays")
            with pytest.raises(SandboxFailure) as error:
                sandbox.reset()
        assert error.value.code == "CR0310"
        sandbox.reset()
        assert run(sandbox, "ls -A") == ""


def test_a_path_out_of_the_tree_gives_the_sandbox_back(pool: SandboxPool) -> None:
    for _ in range(3):
        with pytest.raises(SandboxFileError):
            pool.take(files={"../out": b""})
    with pool.take(timeout_seconds=LONG), pool.take(timeout_seconds=LONG):
        pass


def test_a_tree_that_is_not_there(pool: SandboxPool, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure) as error:
        pool.take(tmp_path / "absent")
    assert error.value.code == "CR0304"


def test_a_jail_that_does_not_start_is_said_by_take(monkeypatch: pytest.MonkeyPatch) -> None:
    if not WarmBubblewrap().is_available().ok:
        pytest.skip("not available here")
    with monkeypatch.context() as context:
        context.setattr(held_jail, "filter_program", lambda: b"no filter")
        with SandboxPool(1) as pool, pytest.raises(SandboxFailure) as error:
            pool.take()
    assert error.value.code == "CR0302"


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_has_at_least_one(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SandboxPool(size)


def test_close_leaves_no_process_and_no_folder(pool: SandboxPool) -> None:
    lent = pool.take()
    run(lent, f"echo {base_python()} > f; sleep 99 & true")
    pool.close()
    pool.close()
    assert descendants(os.getpid()) == []
    assert list(process_folder.process_folder().glob("pool-*")) == []
    assert list(process_folder.process_folder().glob("sandbox-*")) == []
    with pytest.raises(SandboxFailure, match="closed"):
        lent.exec(["true"], timeout_seconds=LONG)
    lent.close()
    with pytest.raises(SandboxFailure, match="closed"):
        pool.take()


def test_awaited(pool: SandboxPool, source: Path) -> None:
    async def rollout(number: int) -> str:
        async with await pool.take_async(source) as sandbox:
            await sandbox.write_file("mine", str(number).encode())
            name = await sandbox.snapshot()
            await sandbox.write_file("mine", b"another's")
            await sandbox.restore(name)
            done = await sandbox.exec("cat f mine", timeout_seconds=LONG)
            await sandbox.reset(source)
            assert [entry.path for entry in await sandbox.list_files()] == ["f"]
            assert await sandbox.read_file("f", max_bytes=4) == b"from"
            return done.stdout

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(rollout(number) for number in range(6)))

    assert asyncio.run(all_of_them()) == [f"from the tree\n{number}" for number in range(6)]
