"""What the ``[agent]`` table of a recipe becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.assembly import attempt_options
from composer_replication.config import AgentSection, HintsSection, RunConfig, load_config, parse_config
from composer_replication.errors import UsageError
from composer_replication.rollouts.episodes.agent_loop import CALL_SECONDS
from composer_replication.rollouts.tools import toolbox as tools


def test_the_loop_waits_for_the_longest_time_out_of_its_tools() -> None:
    longest = max(tools.MAX_COMMAND_SECONDS, tools.SEARCH_SECONDS, tools.TEST_SECONDS)
    assert longest == CALL_SECONDS


def test_the_tests_that_a_run_draws_depend_on_its_seed() -> None:
    config = load_config(Path(__file__).parents[3] / "recipes" / "tiny-tools" / "run.toml")
    assert attempt_options(config.model_copy(update={"seed": 11}))["seed"] == 11


def test_the_monitor_is_asked_in_one_place() -> None:
    """Whoever asks it elsewhere changes the table "Where it looks" of docs/monitor.md, and this test."""
    root = Path(__file__).parents[3]
    package = root / "src" / "composer_replication"
    asking = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "inspect_episode(" in path.read_text() and path.parent.name != "monitor"
    }
    assert asking == {"rollouts/environment/feature_deletion_env.py"}
    assert "## Where it looks" in (root / "docs" / "monitor.md").read_text()


def test_a_recipe_of_an_older_run_is_read() -> None:
    """Its run.toml names keys that have left, at what was their default."""

    def read(**tables: Any) -> RunConfig:
        table = {
            "model": {"name": "tiny-random"},
            "tasks": {"store": "tasks"},
            "trainer": {"alpha_sdpo": 1.0},
        }
        return parse_config({**table, **tables}, where="here")

    assert read(agent={"dialect": "", "max_turns": 3}).agent == AgentSection(max_turns=3)
    with pytest.raises(UsageError, match=r"CR0204: the key agent\.dialect has left: take the line out"):
        read(agent={"dialect": "hermes"})
    left = {"writing": {"layers": ["template", "environment"]}, "turns_per_step": 4}
    assert read(hints=left).hints == HintsSection()
    with pytest.raises(UsageError, match="writing"):
        read(hints={"writing": {"layers": ["template"]}})
