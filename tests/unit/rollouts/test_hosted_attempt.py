"""An attempt in somebody's event loop: nothing blocks it, nothing outlives it, and a broken sandbox is no score."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from episode_parts import attempt_folders

from composer_replication.errors import MissingError, SandboxFailure, UsageError
from composer_replication.records import Task, ToolCall, ToolResult
from composer_replication.rollouts.environment import feature_deletion_env as attempt_module
from composer_replication.rollouts.environment.hosted_attempt import (
    AttemptHost,
    EnvironmentLease,
    HostOptions,
)
from composer_replication.rollouts.grading import Grader
from composer_replication.tasks.store import TaskStore

NUMBERS = "tinymath/numbers.py"
FACES = "composer_replication.rollouts.environment"


@pytest.fixture(scope="module")
def host(store: TaskStore, known_golden: dict[str, Any]) -> AttemptHost:
    host = AttemptHost(HostOptions(store=store.root, with_hidden=True))
    host._grader._golden |= known_golden
    return host


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = attempt_folders()
    yield
    for _ in range(3000):  # whoever closes does not wait for it
        if attempt_folders() == before:
            break
        time.sleep(0.01)
    assert attempt_folders() == before


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  a thread or a process of its own makes it so
        await asyncio.sleep(0.01)


def bash(command: str) -> ToolCall:
    return ToolCall("bash", json.dumps({"command": command}))


async def opened(host: AttemptHost, task: Task) -> EnvironmentLease:
    lease = host.lease()
    await lease.do(lambda environment: environment.reset(task.task_id))
    return lease


async def made(lease: EnvironmentLease, call: ToolCall) -> ToolResult:
    return await lease.do(lambda environment: environment.call(call))


def test_an_attempt_is_graded_once_and_takes_no_calls_afterwards(host: AttemptHost, clamp: Task) -> None:
    async def play() -> None:
        lease = await opened(host, clamp)
        golden = host.store.files(clamp, "golden")[NUMBERS].decode()
        call = ToolCall("write_file", json.dumps({"path": NUMBERS, "content": golden}))
        assert not (await made(lease, call)).is_error
        assert (await made(lease, ToolCall("submit", "(no JSON)"))).is_error
        assert not await lease.do(lambda environment: environment.is_done)
        assert not (await made(lease, ToolCall("submit", ""))).is_error
        assert await lease.do(lambda environment: environment.is_done)
        judged = await lease.do(host.judged)
        assert judged.reward == 1.0 and judged.tree_sha256
        assert (judged.figures["num_calls"], judged.figures["num_invalid_calls"]) == (3, 1)
        assert judged.figures["hidden_pass_share"] == judged.figures["visible_pass_share"] == 1.0
        assert (await made(lease, bash("ls"))).is_error
        assert await lease.do(host.judged) == judged
        lease.release()
        lease.release()
        with pytest.raises(UsageError, match="CR0800"):
            await made(lease, bash("ls"))

    asyncio.run(play())


def test_an_attempt_that_cheats_is_flagged_and_that_is_no_way_out_of_a_cost(
    host: AttemptHost, clamp: Task
) -> None:
    costly = AttemptHost(HostOptions(store=host.store.root, with_hidden=True, invalid_call_cost=3.0))
    costly._grader._golden |= host._grader._golden
    golden = host.store.files(clamp, "golden")[NUMBERS].decode()

    async def play() -> Any:
        lease = await opened(costly, clamp)
        await made(lease, bash("echo 'def leave(): import os; os._exit(0)' >> tinymath/__init__.py"))
        await made(lease, ToolCall("write_file", json.dumps({"path": NUMBERS, "content": golden})))
        await made(lease, ToolCall("no_such_tool", "{}"))
        judged = await lease.do(costly.judged)
        lease.release()
        return judged

    judged = asyncio.run(play())
    assert (judged.reward, judged.masks_reward, judged.figures["is_masked"]) == (-2.0, True, 1.0)
    assert (judged.figures["num_findings"], judged.figures["visible_pass_share"]) == (1.0, 1.0)


def test_calls_at_the_same_time_are_made_one_after_the_other(host: AttemptHost, clamp: Task) -> None:
    async def play() -> None:
        lease = await opened(host, clamp)
        step = "n=$(cat n 2>/dev/null || echo 0); sleep 0.05; echo $((n + 1)) > n"
        results = await asyncio.gather(*(made(lease, bash(step)) for _ in range(6)))
        assert [result.exit_code for result in results] == [0] * 6
        assert (await made(lease, bash("cat n"))).text.strip().startswith("6")
        lease.release()

    asyncio.run(play())


def test_a_call_blocks_no_loop_and_a_cancelled_one_leaves_nothing(host: AttemptHost, clamp: Task) -> None:
    async def play() -> None:
        before = attempt_folders()
        lease = await opened(host, clamp)
        folder = next(iter(attempt_folders() - before))
        wait = "touch begun; until [ -e go_on ]; do sleep 0.02; done"
        running = asyncio.ensure_future(made(lease, bash(wait)))
        await until((folder / "tree" / "begun").exists)  # the loop goes on while the command runs
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        lease.release()
        assert folder in attempt_folders()  # the command still runs there, and nobody waited
        (folder / "tree" / "go_on").touch()
        await until(lambda: attempt_folders() == before)

    asyncio.run(play())


def fail(*arguments: Any, **options: Any) -> Any:
    raise SandboxFailure("CR0302", "the jail broke.")


@pytest.mark.parametrize("place", ["open", "call", "hidden"])
def test_where_the_sandbox_breaks_there_is_no_reward(
    host: AttemptHost, clamp: Task, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "open":
        monkeypatch.setattr(attempt_module, "open_sandbox", fail)
    elif place == "call":
        monkeypatch.setattr("composer_replication.rollouts.tools.toolbox.Toolbox.call", fail)
    else:
        broken, run = {"grade": "visible", "hidden": "hidden"}[place], Grader.grade_once
        once = lambda self, request: fail() if request.tests == broken else run(self, request)  # noqa: E731
        monkeypatch.setattr(Grader, "grade_once", once)

    async def play() -> None:
        lease = host.lease()
        try:
            await lease.do(lambda environment: environment.reset(clamp.task_id))
            await made(lease, bash(f"echo {place} > unseen"))
        except SandboxFailure:
            assert place in {"open", "call"}
        if place != "open":
            with pytest.raises(SandboxFailure, match="graded"):
                await lease.do(host.judged)
        lease.release()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("face", "extra", "library"),
    [("verifiers_face", "verifiers", "openai"), ("inspect_face", "inspect", "inspect_ai")],
)
def test_a_missing_library_is_one_sentence_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, face: str, extra: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"{FACES}.{face}", raising=False)
    with pytest.raises(MissingError, match="CR0101") as raised:
        importlib.import_module(f"{FACES}.{face}")
    assert library in raised.value.message
    assert raised.value.fix == f"pip install 'composer-replication[{extra}]'"
