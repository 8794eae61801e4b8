"""How the parts of a run are joined."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_replication.cli import assembly
from composer_replication.cli.assembly import attempt_options, open_curriculum, open_tasks
from composer_replication.config import AgentSection, HintsSection, RunConfig, load_config, parse_config
from composer_replication.errors import UsageError
from composer_replication.rollouts.episodes.agent_loop import CALL_SECONDS
from composer_replication.rollouts.tools import toolbox as tools
from composer_replication.tasks.difficulty import Difficulty, MeasuredPolicy, record_difficulty
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer.model_modes import parameter_sha256

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"


def test_two_runs_that_start_together_share_one_build(
    build_tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits, and goes on in the same folder; how a build goes on is shown where builds are tested."""
    built = build_tiny(tmp_path / "built", ["tinymath/numbers.py::clamp"])
    folders: list[Path] = []
    running: list[Path] = []

    def build_tasks(_sources: list[str], folder: Path, **_options: Any) -> Any:
        folders.append(folder)
        assert not running
        running.append(folder)
        time.sleep(0.3)
        shutil.copytree(built, folder, dirs_exist_ok=True)
        running.clear()
        return SimpleNamespace(require_tasks=lambda: None)

    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(assembly.build, "build_tasks", build_tasks)
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda _: open_tasks(load_config(RECIPE), RECIPE.parent, None), range(2)))
    assert folders == [store.root for store in stores]
    assert folders[0] == folders[1]
    assert stores[0].fingerprint == stores[1].fingerprint == TaskStore.open(built).fingerprint


# ---- the curriculum joined to a recipe: off without its table, and begun with what was measured beside the tasks


ROWS = [{"prompt": "p", "task_id": name} for name in ("t-function-body", "t-class-body")]


def recipe(**tables: Any) -> RunConfig:
    return parse_config(
        {"model": {"name": "tiny-random"}, "tasks": {"store": "tasks"}, **tables}, where="run.toml"
    )


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_without_its_table_there_is_none(sized_store: TaskStore, model: torch.nn.Module) -> None:
    assert open_curriculum(recipe(), sized_store, ROWS, model) is None


def test_it_belongs_to_the_store_and_the_seed(sized_store: TaskStore, model: torch.nn.Module) -> None:
    found = open_curriculum(recipe(seed=4, curriculum={}), sized_store, ROWS, model)
    same = open_curriculum(recipe(seed=4, curriculum={}), sized_store, ROWS, model)
    assert found is not None and same is not None
    assert found.state_dict()["tasks_fingerprint"] == sized_store.fingerprint
    assert [found.chosen_rows(1) for _ in range(30)] == [same.chosen_rows(1) for _ in range(30)]


def test_pass_rates_of_the_very_weights_come_first(sized_store: TaskStore, model: torch.nn.Module) -> None:
    def policy(sha256: str) -> MeasuredPolicy:
        return MeasuredPolicy(sha256[:8], sha256, 1.0, "completion", 12, 64)

    own, other = policy(parameter_sha256(model)), policy("0" * 64)
    record_difficulty(sized_store.root, 0, [Difficulty("t-function-body", own, 4, 1, None)])
    strange = [Difficulty(row["task_id"], other, 4, 4, None) for row in ROWS]
    record_difficulty(sized_store.root, 0, strange)

    found = open_curriculum(recipe(curriculum={}), sized_store, ROWS, model)
    assert found is not None
    standings = (found.standings[row["task_id"]] for row in ROWS)
    assert [(each.passed, each.failed) for each in standings] == [(1.0, 3.0), (4.0, 0.0)]


# ---- what the [agent] table becomes


def test_the_loop_waits_for_the_longest_time_out_of_its_tools() -> None:
    longest = max(tools.MAX_COMMAND_SECONDS, tools.SEARCH_SECONDS, tools.TEST_SECONDS)
    assert longest == CALL_SECONDS


def test_the_tests_that_a_run_draws_depend_on_its_seed() -> None:
    config = load_config(RECIPE.parents[1] / "tiny-tools" / "run.toml")
    assert attempt_options(config.model_copy(update={"seed": 11}))["seed"] == 11


def test_a_recipe_of_an_older_run_is_read() -> None:
    """Its run.toml names keys that have left, at what was their default."""
    sdpo = {"trainer": {"alpha_sdpo": 1.0}}
    assert recipe(agent={"dialect": "", "max_turns": 3}).agent == AgentSection(max_turns=3)
    with pytest.raises(UsageError, match=r"CR0204: the key agent\.dialect has left: take the line out"):
        recipe(agent={"dialect": "hermes"})
    left = {"writing": {"layers": ["template", "environment"]}, "turns_per_step": 4}
    assert recipe(hints=left, **sdpo).hints == HintsSection()
    with pytest.raises(UsageError, match="writing"):
        recipe(hints={"writing": {"layers": ["template"]}}, **sdpo)
