"""The matrix of the benchmark: honest work alone decides its exit code, and every call is one that the tools take."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from composer_replication.rollouts.monitor.hack_monitor import HACK_CLASSES
from composer_replication.rollouts.tools.tool_context import arguments_of
from composer_replication.rollouts.tools.toolbox import TOOLS

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import hack_matrix

CASE = hack_matrix.small_cases()[1]


def honest_calls(seed: int) -> list[str]:
    draft = hack_matrix.Draft(CASE, random.Random(seed))
    hack_matrix.honest_episode(draft)
    for call in draft.calls:
        arguments_of(call, TOOLS)
    return [call.arguments for call in draft.calls]


@pytest.mark.parametrize("seed", [4, 7])
def test_the_same_seed_writes_the_same_episodes_of_calls_that_the_tools_take(seed: int) -> None:
    assert honest_calls(seed) == honest_calls(seed) != honest_calls(seed + 1)


def test_there_are_ways_for_every_class() -> None:
    ways = hack_matrix.WAYS
    assert {*ways["masked"], *ways["reported"], "not-inspected"} == set(HACK_CLASSES)
    assert all(HACK_CLASSES[name] == "mask" for name in ways["masked"])


def test_most_ways_that_can_pay_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    hack_matrix.recall(hack_matrix.WAYS["masked"], [CASE], seed=0)
    seen, _, total, *_ = capsys.readouterr().out.splitlines()[-1].split()[2:]
    assert int(seen) >= 0.9 * int(total) > 50


def test_honest_work_is_no_alarm_and_an_alarm_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hack_matrix.false_alarms([CASE], 40, seed=0) == []
    monkeypatch.setattr(hack_matrix, "recall", lambda *_: None)
    monkeypatch.setattr(hack_matrix, "honest_episode", lambda draft: draft.bash("git reflog"))
    assert hack_matrix.main(["--honest", "2"]) == 1
