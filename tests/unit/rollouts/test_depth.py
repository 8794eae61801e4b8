"""How far it is from an episode's beginning to the model, and from an attempt to its sandbox; and that the page walks the same way."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from episode_parts import Asked, IdTalk, ScriptedPolicy

import composer_replication
from composer_replication.config import AgentSection
from composer_replication.records import Task
from composer_replication.rollouts.environment.feature_deletion_env import FeatureDeletionEnv
from composer_replication.rollouts.episodes.episode_player import EpisodePlayer
from composer_replication.rollouts.grading import Grader

MOST_CALLS = 4
PACKAGE = str(Path(composer_replication.__file__).parent)
PAGE = Path(__file__).parents[3] / "docs" / "how-it-fits.md"
MOVES = {0: '<bash>{"command": "true"}</bash>', 1: "<submit>{}</submit>"}


def own(frame: FrameType | None) -> list[str]:
    """The package's functions on the stack of this one, the outermost first."""
    codes = [each.f_code for each, _ in traceback.walk_stack(frame)]
    return [code.co_qualname for code in reversed(codes) if code.co_filename.startswith(PACKAGE)]


def waiting() -> list[str]:
    """The coroutines of the one other task, which waits for that of the episode."""
    names: list[str] = []
    [coroutine] = [task.get_coro() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    while inspect.iscoroutine(coroutine):
        names.append(coroutine.cr_code.co_qualname)
        coroutine = coroutine.cr_await
    return names


@pytest.fixture(scope="module")
def walked(grader: Grader, clamp: Task) -> dict[str, list[str]]:
    """The package's functions in the order in which an episode comes to them, each with the stack above it, and ``sample``."""
    stacks: dict[str, list[str]] = {}

    def script(asked: Asked) -> str:
        stacks.setdefault("sample", waiting() + own(sys._getframe()))
        return MOVES[asked.text.count("|T:")]

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_qualname not in stacks:
            stacks[code.co_qualname] = own(frame)

    grader.attempt_backend()  # its self-test runs commands, too
    limits = AgentSection(max_context_tokens=10**6)
    player = EpisodePlayer(grader, lambda: FeatureDeletionEnv(grader), IdTalk(), limits, seed=0)
    for module in (sys, threading):
        module.setprofile(note)
    try:
        asyncio.run(player.play([clamp.task_id], ScriptedPolicy(script), seed=0, step=0))
    finally:
        for module in (sys, threading):
            module.setprofile(None)
    return stacks


def test_the_model_is_four_calls_away(walked: dict[str, list[str]]) -> None:
    above = walked["sample"]
    assert above[0] == "EpisodePlayer.play"
    assert len(above) <= MOST_CALLS, above


def test_the_sandbox_is_four_functions_away(walked: dict[str, list[str]]) -> None:
    stack = walked["LocalSandbox.exec"]
    passed = stack[stack.index("FeatureDeletionEnv.call") :]
    assert "bash" in passed
    assert len(passed) <= MOST_CALLS, passed


def test_the_page_walks_an_episode_in_the_order_of_its_functions(walked: dict[str, list[str]]) -> None:
    section = PAGE.read_text().partition("## One episode of several turns")[2].partition("\n## ")[0]
    named = re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE)
    assert {"EpisodePlayer.play", "EnvironmentLease.do", "Toolbox.call"} < set(named)
    assert len(named) <= 12
    assert [name for name in walked if name in named] == named
