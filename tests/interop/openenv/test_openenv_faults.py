"""What breaks under a session: sandboxes, calls that never come back, faults of ours, clients that go. In one process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import SandboxFailure, UsageError
from composer_replication.records import SandboxSpec, ToolResult
from composer_replication.rollouts.environment import attempt as attempt_module
from composer_replication.rollouts.environment import openenv_session
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.openenv_client import FeatureDeletionClient
from composer_replication.rollouts.environment.openenv_environment import OpenEnvFeatureDeletion
from composer_replication.rollouts.environment.openenv_messages import (
    NotUnderstood,
    ResetAsked,
    StepAsked,
    error_frame,
    observation_frame,
    read_frame,
)
from composer_replication.rollouts.environment.openenv_session import Session
from composer_replication.rollouts.environment.openenv_types import AttemptObservation, ToolAction
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.toolbox import Toolbox
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.store import TaskStore


@pytest.fixture(scope="module")
def grader(store: TaskStore) -> Iterator[Grader]:
    grader = Grader(store)
    yield grader
    grader.close()


@pytest.fixture
def environment(grader: Grader) -> Iterator[OpenEnvFeatureDeletion]:
    made = OpenEnvFeatureDeletion(FeatureDeletionEnv(grader), max_calls=2)
    yield made
    made.close()
    assert not [*process_folder().glob("attempt-*")]


class FakeSocket:
    """Both ends of an accepted WebSocket, as Starlette shows ours."""

    def __init__(self) -> None:
        self.to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.close_code = 0

    async def receive(self) -> dict[str, Any]:
        return await self.to_server.get()

    async def send_text(self, text: str) -> None:
        self.said.put_nowait(json.loads(text))

    async def close(self, code: int) -> None:
        self.close_code = code

    def ask(self, kind: str, **data: Any) -> None:
        self.to_server.put_nowait(
            {"type": "websocket.receive", "text": json.dumps({"type": kind, "data": data})}
        )

    def vanish(self) -> None:
        self.to_server.put_nowait({"type": "websocket.disconnect"})


def hold(
    environment: OpenEnvFeatureDeletion, scene: Callable[[FakeSocket], Any], call_seconds: float = 300.0
) -> FakeSocket:
    """One session from its beginning to its close, while ``scene`` plays its client."""

    async def play() -> FakeSocket:
        socket = FakeSocket()
        with ThreadPoolExecutor(2) as threads:
            session = Session(
                socket,
                environment,
                threads,
                idle_seconds=300.0,
                call_seconds=call_seconds,
                on_answer=lambda observation: None,
            )
            running = asyncio.create_task(session.run())
            await scene(socket)
            await running
            await session.close()
        return socket

    return asyncio.run(play())


def breaks(*_: object) -> ToolResult:
    raise SandboxFailure("CR0302", "the jail is gone.", where="/a/path/of/the/server")


def parsed(observation: AttemptObservation) -> Any:
    """As the client reads it, after the whole way over the wire."""
    client = FeatureDeletionClient("http://127.0.0.1:1")
    return client._parse_result(json.loads(observation_frame(observation))["data"])


def test_a_lost_reward_travels_as_null_with_its_reason(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.reset(seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(Toolbox, "call", breaks)
        result = parsed(environment.step(ToolAction(name="bash", arguments={"command": "ls"})))
    assert (result.reward, result.observation.reward, result.done) == (None, None, True)
    assert result.observation.stop_reason == "infrastructure"
    assert "CR0302" in result.observation.infrastructure_failure

    environment.reset(seed=0)
    monkeypatch.setattr(Grader, "grade_tree", lambda *_: None)
    result = parsed(environment.step(ToolAction(name="submit")))
    assert (result.reward, result.done) == (None, True)
    assert result.observation.infrastructure_failure == "the grading failed"
    assert '"reward": null' in observation_frame(result.observation)


def test_a_sandbox_that_does_not_open_is_tried_again_and_then_said(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = attempt_module.open_sandbox

    def opens_never(spec: SandboxSpec, *rest: Any, **more: Any) -> Any:
        asked.append(spec.tree)
        return breaks()

    def opens_later(spec: SandboxSpec, *rest: Any, **more: Any) -> Any:
        return real(spec, *rest, **more) if asked else opens_never(spec)

    monkeypatch.setattr(attempt_module, "open_sandbox", opens_later)
    assert not environment.reset(seed=0).done and len(asked) == 1
    monkeypatch.setattr(attempt_module, "open_sandbox", opens_never)
    result = parsed(environment.reset(seed=0))
    assert (result.reward, result.done, len(asked)) == (None, True, 3)
    assert result.observation.infrastructure_failure == "CR0302: the jail is gone."
    assert environment.state.is_over
    with pytest.raises(UsageError, match="CR0800"):
        environment.step(ToolAction(name="submit"))


def test_the_last_call_that_is_allowed_is_graded(environment: OpenEnvFeatureDeletion) -> None:
    environment.reset(seed=0)
    assert not environment.step(ToolAction(name="nonsense")).done
    last = environment.step(ToolAction(name="bash", arguments={"command": "ls"}))
    assert (last.done, last.reward, last.stop_reason, last.num_invalid) == (True, 0.0, "turns", 1)


def test_a_call_that_does_not_come_back_ends_the_session(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv_session, "_GRACE_SECONDS", 0.0)
    released = threading.Event()
    monkeypatch.setattr(Toolbox, "call", lambda *_: released.wait(60) and ToolResult("late"))

    async def scene(socket: FakeSocket) -> None:
        socket.ask("reset", seed=0)
        assert (await socket.said.get())["type"] == "observation"
        socket.ask("step", name="bash", arguments={"command": "ls"})
        said = await socket.said.get()
        assert "CR0855" in said["data"]["message"] and "not to be scored" in said["data"]["message"]
        released.set()

    assert hold(environment, scene, call_seconds=0.01).close_code == 1001


def test_grading_may_take_longer_than_a_call(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv_session, "_GRACE_SECONDS", 0.0)
    graded, asked_again = threading.Event(), asyncio.Event()
    looks: list[bool] = []
    told: list[bool] = []
    really = OpenEnvFeatureDeletion.is_grading.fget
    assert really is not None

    def is_grading(environment: OpenEnvFeatureDeletion) -> bool:
        looks.append(True)
        if len(looks) > 1:
            asked_again.set()
        return True

    def reward(*_: object) -> float:
        told.append(really(environment))
        assert graded.wait(60)
        return 0.5

    monkeypatch.setattr(OpenEnvFeatureDeletion, "is_grading", property(is_grading))
    monkeypatch.setattr(FeatureDeletionEnv, "reward", reward)
    assert not really(environment)
    environment.reset(seed=0)
    assert not really(environment)

    async def scene(socket: FakeSocket) -> None:
        socket.ask("step", name="submit")
        await asked_again.wait()  # the time of a call was over twice
        graded.set()
        assert (await socket.said.get())["data"]["reward"] == 0.5
        socket.ask("close")

    assert hold(environment, scene, call_seconds=0.01).close_code == 1000
    assert told == [True]


def test_a_fault_of_ours_is_said_without_its_text(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(*_: object) -> ToolResult:
        raise KeyError("a secret")

    monkeypatch.setattr(Toolbox, "call", bug)

    async def scene(socket: FakeSocket) -> None:
        socket.ask("reset", seed=0)
        await socket.said.get()
        socket.ask("step", name="bash")
        text = (await socket.said.get())["data"]["message"]
        assert "CR0855" in text and "KeyError" in text and "a secret" not in text

    hold(environment, scene)
    assert "a secret" in capsys.readouterr().err


def test_a_client_that_goes_while_its_sandbox_is_opened_leaves_none(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, gone = threading.Event(), threading.Event()
    real = attempt_module.open_sandbox
    opened = []

    def slow(*rest: Any, **more: Any) -> Any:
        opening.set()
        assert gone.wait(60)
        opened.append(real(*rest, **more))
        return opened[-1]

    monkeypatch.setattr(attempt_module, "open_sandbox", slow)

    async def scene(socket: FakeSocket) -> None:
        socket.ask("reset", seed=0)
        await asyncio.to_thread(opening.wait)
        socket.vanish()
        asyncio.get_running_loop().call_later(0.1, gone.set)

    socket = hold(environment, scene)
    assert len(opened) == 1 and socket.said.empty()
    assert not [*process_folder().glob("attempt-*")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "data", "name", "arguments", "metadata", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(["reset", "step", "state", "close", "mcp", ""])
MESSAGES = st.builds(lambda kind, data: json.dumps({"type": kind, "data": data}), KINDS, JSON)


@settings(max_examples=200)
@given(MESSAGES | JSON.map(json.dumps) | st.text() | st.binary())
def test_whatever_a_client_sends_is_asked_or_refused(frame: str | bytes) -> None:
    asked = read_frame(frame)
    match asked:
        case NotUnderstood(kind, error):
            said = json.loads(error_frame(error, kind))
            assert said["type"] == "error" and said["data"]["message"].startswith("CR0854")
        case StepAsked(action):
            assert isinstance(action.to_call().arguments, str)
        case ResetAsked(arguments):
            assert isinstance(arguments, dict)


@given(
    st.text(st.characters(codec="utf-8")),
    st.none() | st.floats(-10, 10),
    st.booleans(),
    st.none() | st.integers(0, 255),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
def test_an_observation_arrives_as_it_was_sent(
    text: str, reward: float | None, done: bool, code: int | None, failure: str
) -> None:
    sent = AttemptObservation(
        text=text, reward=reward, done=done, exit_code=code, infrastructure_failure=failure
    )
    result = parsed(sent)
    assert (result.observation, result.reward, result.done) == (sent, reward, done)


def test_too_many_messages_at_once_end_the_session(environment: OpenEnvFeatureDeletion) -> None:
    async def scene(socket: FakeSocket) -> None:
        for _ in range(20):
            socket.ask("state")

    assert hold(environment, scene).close_code == 1008
