"""What TRL itself reads of the face: the tools, their schemas, and its tool loop over them."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from transformers.utils import get_json_schema

from composer_replication.errors import SandboxFailure
from composer_replication.records import Score, ToolCall, ToolResult
from composer_replication.rollouts.environment.feature_deletion_env import Judgement
from composer_replication.rollouts.environment.trl_face import TrlFeatureDeletion
from composer_replication.rollouts.tools.toolbox import ACTIONS, TOOLS


class Recorded:
    """An environment that keeps what it is asked."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.is_closed = False
        self.breaks = False

    def reset(self, task_id: str) -> str:
        return f"do {task_id}"

    def call(self, call: ToolCall) -> ToolResult:
        if self.breaks:
            raise SandboxFailure("CR0302", "broken.")
        self.calls.append(call)
        return ToolResult("done")

    def finish(self) -> Judgement:
        return Judgement(Score({}), reward=0.5, graded_reward=0.5)

    def close(self) -> None:
        self.is_closed = True


def public_functions(face: Any) -> dict[str, Any]:
    """As ``GRPOTrainer`` finds the tools of an environment."""
    found = inspect.getmembers(type(face), predicate=inspect.isfunction)
    return {name: getattr(face, name) for name, _ in found if not name.startswith("_")}


def test_trl_finds_the_tools_and_nothing_else() -> None:
    assert set(public_functions(TrlFeatureDeletion(Recorded()))) == {*ACTIONS, "reset", "get_reward"}


@pytest.mark.parametrize("name", ACTIONS)
def test_the_schema_that_trl_shows_is_the_one_of_the_other_faces(name: str) -> None:
    shown = get_json_schema(public_functions(TrlFeatureDeletion(Recorded()))[name])["function"]
    ours = next(tool for tool in TOOLS if tool.name == name)
    assert (shown["name"], shown["description"]) == (ours.name, ours.description)
    assert shown["parameters"]["properties"] == ours.parameters["properties"]
    assert shown["parameters"].get("required", []) == ours.parameters.get("required", [])


def test_calls_reach_the_environment_as_they_were_made() -> None:
    environment = Recorded()
    face = TrlFeatureDeletion(environment)
    assert face.reset(task_id="t", prompt=[]) == "do t"
    tools = public_functions(face)
    assert tools["bash"](command="ls", timeout_seconds=3) == "done"
    assert tools["submit"](y=object) == "done"
    made = [(call.name, json.loads(call.arguments)) for call in environment.calls]
    assert made == [("bash", {"command": "ls", "timeout_seconds": 3}), ("submit", {"y": repr(object)})]
    assert face.get_reward() == 0.5
    assert environment.is_closed


def test_a_broken_sandbox_is_told_and_is_no_error_of_the_tool() -> None:
    environment = Recorded()
    environment.breaks = True
    face = TrlFeatureDeletion(environment)
    face.reset(task_id="t")
    assert "not counted" in public_functions(face)["bash"](command="ls")
