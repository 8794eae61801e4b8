"""How the parts of a run are joined."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composer_replication.cli import assembly
from composer_replication.cli.assembly import open_tasks, training_rows
from composer_replication.cli.task_division import divide_tasks
from composer_replication.config import RunConfig, load_config
from composer_replication.errors import InputError

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "run.toml"

PINS = ["tinymath/text.py::is_palindrome", "tinymath/text.py::shout"]


def config_of(**changes: object) -> RunConfig:
    return load_config(RECIPE, changes)


def test_two_runs_that_start_together_share_one_build() -> None:
    config = config_of(**{"tasks.symbols": {"project": PINS}})
    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(lambda _: open_tasks(config, RECIPE.parent, None), range(2)))
    assert stores[0].fingerprint == stores[1].fingerprint
    assert len(stores[0].tasks()) == 2


def test_train_and_held_out_tasks_are_disjoint_by_content() -> None:
    config = config_of()
    tasks = divide_tasks(config, open_tasks(config, RECIPE.parent, None), RECIPE.parent)
    assert tasks.split is not None
    assert {"id", "content", "origin"} <= set(tasks.split.checked)
    assert all(task.has_hidden_tests for task in tasks.heldout)
    assert not {task.task_id for task in tasks.train} & {task.task_id for task in tasks.heldout}


def test_a_task_whose_prompt_shows_its_golden_body_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of()
    store = open_tasks(config, RECIPE.parent, None)
    whole = divide_tasks(config, store, RECIPE.parent)
    assert whole.num_leaking == 0
    shown = whole.train[0]
    line = assembly.prompt_of(config, store, shown).strip().splitlines()[0]
    golden = store.golden_body
    monkeypatch.setattr(store, "golden_body", lambda task: f"\n    {line}" if task == shown else golden(task))
    tasks = divide_tasks(config, store, RECIPE.parent)
    assert tasks.num_leaking == 1
    assert shown not in (*tasks.train, *tasks.heldout)
    with pytest.raises(InputError, match="CR0429"):
        training_rows(config, store, whole.train)
