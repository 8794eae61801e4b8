"""What breaks under an attempt, as OpenEnv's client is told it. In one process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from openenv.core.env_server.serialization import serialize_observation

from composer_replication.errors import InputError, SandboxFailure
from composer_replication.records import SandboxSpec, ToolResult
from composer_replication.rollouts.environment import feature_deletion_env as attempt_module
from composer_replication.rollouts.environment import openenv_server
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.environment.hosted_attempt import listen
from composer_replication.rollouts.environment.openenv_client import (
    AttemptObservation,
    FeatureDeletionClient,
    ToolAction,
)
from composer_replication.rollouts.environment.openenv_server import OpenEnvFeatureDeletion
from composer_replication.rollouts.grading import Grader
from composer_replication.rollouts.tools.toolbox import MAX_COMMAND_SECONDS, Toolbox
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.store import TaskStore


@pytest.fixture(scope="module")
def grader(store: TaskStore) -> Iterator[Grader]:
    grader = Grader(store)
    yield grader
    grader.close()


@pytest.fixture
def environment(grader: Grader) -> Iterator[OpenEnvFeatureDeletion]:
    made = OpenEnvFeatureDeletion(partial(FeatureDeletionEnv, grader), 2, Counter())
    yield made
    made.close()
    assert not [*process_folder().glob("attempt-*")]


def breaks(*_: object) -> ToolResult:
    raise SandboxFailure("CR0302", "the jail is gone.", where="/a/path/of/the/server")


def parsed(observation: AttemptObservation) -> Any:
    """As the client reads it, after the whole way over the wire."""
    client = FeatureDeletionClient("http://127.0.0.1:1")
    return client._parse_result(json.loads(json.dumps(serialize_observation(observation))))


def test_a_lost_reward_travels_as_null_with_its_reason(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.reset(seed=0)
    with monkeypatch.context() as patch:
        patch.setattr(Toolbox, "call", breaks)
        result = parsed(environment.step(ToolAction(name="bash", arguments={"command": "ls"})))
    assert (result.reward, result.observation.reward, result.done) == (None, None, True)
    assert result.observation.stop_reason == "infrastructure"
    assert result.observation.infrastructure_failure == "CR0302: the jail is gone."

    environment.reset(seed=0)
    monkeypatch.setattr(Grader, "grade_tree", lambda *_: None)
    result = parsed(environment.step(ToolAction(name="submit")))
    assert (result.reward, result.done) == (None, True)
    assert result.observation.infrastructure_failure == "the grading failed"


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
    with pytest.raises(RuntimeError, match="CR0800"):
        environment.step(ToolAction(name="submit"))


def test_the_last_call_that_is_allowed_is_graded(environment: OpenEnvFeatureDeletion) -> None:
    environment.reset(seed=0)
    assert not environment.step(ToolAction(name="nonsense")).done
    last = environment.step(ToolAction(name="bash", arguments={"command": "ls"}))
    assert (last.done, last.reward, last.stop_reason) == (True, 0.0, "turns")
    assert (environment.state.step_count, environment.state.num_invalid) == (2, 1)


def test_after_close_nothing_is_begun_any_more(environment: OpenEnvFeatureDeletion) -> None:
    """The library closes the environment of an idle session, and goes on to pass it what its socket says."""
    environment.reset(seed=0)
    environment.close()
    for use in (lambda: environment.reset(seed=0), lambda: environment.step(ToolAction(name="submit"))):
        with pytest.raises(RuntimeError, match=r"CR0800: this session has ended.*connect anew"):
            use()
    assert environment.state.is_over and not [*process_folder().glob("attempt-*")]


def test_closed_while_a_sandbox_opens_it_keeps_none(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attempt_module.open_sandbox

    def opens_too_late(*spec: Any, **more: Any) -> Any:
        environment.close()
        return real(*spec, **more)

    monkeypatch.setattr(attempt_module, "open_sandbox", opens_too_late)
    with pytest.raises(RuntimeError, match="CR0800"):
        environment.reset(seed=0)
    assert environment.state.is_over and not [*process_folder().glob("attempt-*")]


@pytest.mark.parametrize(("broken", "name"), [(Toolbox, "call"), (Grader, "grade_tree")])
def test_a_damaged_store_ends_the_attempt_and_names_no_place(
    environment: OpenEnvFeatureDeletion, monkeypatch: pytest.MonkeyPatch, broken: type, name: str
) -> None:
    def damaged(*_: object) -> None:
        raise InputError(
            "CR0411", "the store is damaged.", where="/a/path/of/the/server", fix="build it anew."
        )

    environment.reset(seed=0)
    monkeypatch.setattr(broken, name, damaged)
    with pytest.raises(RuntimeError, match="CR0411") as refused:
        environment.step(ToolAction(name="submit"))
    assert str(refused.value) == "CR0411: the store is damaged. Next: build it anew."
    assert environment.state.is_over and not [*process_folder().glob("attempt-*")]


def test_a_call_that_is_under_way_is_no_silence(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []

    def watched(*_: Any, concurrency_config: Any, **__: Any) -> None:
        bounds.append(concurrency_config.session_timeout)
        raise ZeroDivisionError  # nothing is served

    monkeypatch.setattr(openenv_server, "create_fastapi_app", watched)
    how: dict[str, Any] = {"max_sessions": 1, "max_calls": 1, "monitor": "off", "on_ready": print}
    with listen("127.0.0.1", 0) as listener, pytest.raises(ZeroDivisionError):
        openenv_server.serve(listener, grader, session_seconds=7, **how)
    assert bounds == [7 + MAX_COMMAND_SECONDS] == [307]
